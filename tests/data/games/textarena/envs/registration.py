from types import SimpleNamespace

GAMES = {
    "Doors-v0": "textarena.envs.doors:Doors",
    "Doors-v0-train": "textarena.envs.doors:Doors",
    "Swapped-v0": "textarena.envs.doors:Swapped",
    "Set-v0": "textarena.envs.doors:Points",
    "Locked-v0": "textarena.envs.doors:Locked",
    "Duel-v0": "textarena.envs.duel:Duel",
    "Gone-v0": "textarena.envs.gone:Gone",
}
ENV_REGISTRY = {name: SimpleNamespace(entry_point=game) for name, game in GAMES.items()}
