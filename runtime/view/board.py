"""W&B: the run of --track."""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from runtime.flags import shown
from runtime.view import terminal

ANSWERS_WITHIN = 4.0  # seconds; W&B's client asks twice


def open_board(path: Path, wandb_id: str, flags: dict, quiet: bool):
    """The W&B run of --track. Where W&B does not answer within seconds, an offline one."""
    import wandb

    options = dict(project="istar", name=path.name, id=wandb_id, resume="allow", config=flags)
    wait = {"init_timeout": ANSWERS_WITHIN, "finish_timeout": 60, "silent": quiet}
    try:
        settings = wandb.setup().settings
        if settings.mode == "online" and not {"HTTPS_PROXY", "https_proxy"} & os.environ.keys():
            url = urlsplit(settings.base_url)  # its client would try for much longer
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.hostname, port), ANSWERS_WITHIN).close()
        return wandb.init(**options, settings=wandb.Settings(**wait))
    except Exception as error:  # network, key and service have no common class
        secret = os.environ.get("WANDB_API_KEY") or "\n"
        reason = shown(str(error).split("\n")[0].replace(secret, "..."))
        way = "the run goes on as with WANDB_MODE=offline, and `wandb sync` sends it later"
        terminal.warn(f"--track: W&B cannot be had ({reason}); {way}")
    wandb.teardown()  # its service holds the run half open
    return wandb.init(**options, mode="offline")
