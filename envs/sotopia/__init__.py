"""SOTOPIA: conversations with private goals. What it is and how it is played: world.py."""

from envs.sotopia.conversation import (
    Conversation,
    ConversationLost,
    Episode,
    parse_action,
    partner_messages,
    partner_words,
)
from envs.sotopia.endpoint import (
    Endpoint,
    EndpointError,
    check_url,
    read_key,
)
from envs.sotopia.expert import (
    expert,
)
from envs.sotopia.judge import (
    DIMENSIONS,
    Judge,
    escape,
    judge_messages,
    overall,
    read_verdict,
    verdict_schema,
)
from envs.sotopia.own import (
    DIVISIONS,
    FRIENDS,
    own_scenario,
)
from envs.sotopia.rules import (
    Bargain,
    CommonFriend,
    Division,
)
from envs.sotopia.scenarios import (
    FILES,
    HARD,
    LEAVE,
    DataError,
    Scenario,
    background,
    load_published,
    overview,
    recast,
    visible,
)
from envs.sotopia.scripted import (
    Bargainer,
    Guest,
    scripted,
)
from envs.sotopia.world import (
    Sotopia,
    SotopiaArgs,
)

__all__ = [
    "Bargain",
    "Bargainer",
    "CommonFriend",
    "Conversation",
    "ConversationLost",
    "DIMENSIONS",
    "DIVISIONS",
    "DataError",
    "Division",
    "Endpoint",
    "EndpointError",
    "Episode",
    "FILES",
    "FRIENDS",
    "Guest",
    "HARD",
    "Judge",
    "LEAVE",
    "Scenario",
    "Sotopia",
    "SotopiaArgs",
    "background",
    "check_url",
    "escape",
    "expert",
    "judge_messages",
    "load_published",
    "overall",
    "overview",
    "own_scenario",
    "parse_action",
    "partner_messages",
    "partner_words",
    "read_key",
    "read_verdict",
    "recast",
    "scripted",
    "verdict_schema",
    "visible",
]
