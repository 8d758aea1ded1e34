"""A game with a TwoPlayerState."""
