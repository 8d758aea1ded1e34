"""The end of a run: whatever stops it leaves one line that says what is kept and how to go on."""

import contextlib
import errno
import functools
import os
import shutil
import signal
import sys
import traceback
from dataclasses import asdict, is_dataclass
from pathlib import Path

from runtime.distributed import processes
from runtime.engines import EngineError
from runtime.flags import shown
from runtime.saving.checkpoints import finish_saving, how_to_go_on
from runtime.saving.files import replace_file, rows_of, to_json
from runtime.view.terminal import first_line
from runtime.worlds import OURS, SHORT, began, needed

import torch

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)  # no space, a file or a quota at its limit
current: list = []  # the Run that this process is at work in


def ends_cleanly(main):
    """Around a script's main: what stops a run leaves one line that says how to go on."""
    own_process = main.__module__ == "__main__"

    @functools.wraps(main)
    def guarded():
        at_work = os.getpid()  # 0: it is ending

        def terminated(*_):
            if os.getpid() != at_work:  # it is ending already, or one that the world has forked
                os._exit(128 + signal.SIGTERM)
            raise KeyboardInterrupt("SIGTERM")

        current.clear()
        usual = {torch.get_default_dtype: torch.float32, torch.is_grad_enabled: True}
        began.update({read: read() for read in OURS} | usual)
        signal.signal(signal.SIGTERM, terminated)
        try:
            main()
        except BaseException as error:
            at_work = 0  # before anything else: a second SIGTERM must not raise in here
            signal.signal(signal.SIGINT, lambda *_: os._exit(1))
            with contextlib.suppress(Exception):  # of two errors the first is told
                finish_saving()
                if not current and "MASTER_ADDR" in os.environ and isinstance(error, SystemExit):
                    processes.tell_refusal(f"was refused: {error}")
            try:
                stop(current[0] if current else None, error)
            except SystemExit as end:
                if own_process and current and isinstance(end.code, str):  # W&B may take time
                    sys.stderr.write(f"{end.code}\n")
                    sys.exit(1)
                raise
        finally:
            needed.clear()
            for run in current:
                if run.board:
                    run.board.finish()
                discard(run)
                if run.lock is not None:
                    os.close(run.lock)
        if own_process:
            processes.end()

    return guarded


def stop(run, error: BaseException) -> None:
    """End the process with what a user has to know; pass on errors that nobody foresaw."""
    path = run.path if run else None
    kept = how_to_go_on(path) if path else " before a run began"
    frames = [*traceback.walk_tb(error.__traceback__)]
    is_lost = isinstance(error, torch.distributed.DistError) or "gloo" in str(error)
    if isinstance(error, KeyboardInterrupt):
        sys.exit(processes.rank() or f"\nstopped{f' by {error}' if str(error) else ''}{kept}")
    if isinstance(error, RuntimeError) and is_lost and processes.count() > 1:
        sys.exit(f"\nstopped: another process of this run ended{kept}")
    if path is None:
        names = ("from_args", "__post_init__", "parse")[: 3 if isinstance(error, Exception) else 2]
        in_main = frames[-1][0].f_code.co_name == "main" and isinstance(error, Exception)
        for frame, line in reversed(frames):
            code, is_line = frame.f_code, isinstance(getattr(error, "code", None), str)
            if (code.co_name in names or in_main) and not is_line:
                at = f"{code.co_filename}, line {line}{'; see envs/README.md' * in_main}"
                sys.exit(f"{code.co_qualname} raised {first_line(error)} ({at})")
        raise error
    if isinstance(error, SystemExit) and str(error).startswith("stopped: "):  # in all processes
        sys.exit(processes.rank() or f"{error}{kept}")
    if isinstance(error, SystemExit) and not error.code:
        sys.exit(f"stopped: sys.exit() in a task of the world's{kept}")
    if isinstance(error, FloatingPointError):
        if processes.rank():
            sys.exit(1)
        file = path / f"batch-{run.iteration:06d}.json"
        values = next(f.f_locals for f, _ in frames if f.f_code.co_name == "main").items()
        lists = {n: v for n, v in values if isinstance(v, list) and v and is_dataclass(v[0])}
        had = {name: [asdict(item) for item in items] for name, items in lists.items()}
        had |= {n: v.tolist() for n, v in values if isinstance(v, torch.Tensor)}
        with contextlib.suppress(OSError):  # the disk may be full
            replace_file(file, to_json(had, default=SHORT.repr))  # pictures
        batch = f"the batch is in {file}" if file.exists() else f"{file} cannot be written"
        kept = f"{kept} (a smaller --learning-rate, named in --override, may help)"
        sys.exit(f"\nstopped: {error}; {batch}{kept}")
    if isinstance(error, EngineError):
        other = "" if run.args.run_args.engine_url else ", or --engine hf needs nothing more"
        sys.exit(f"\nstopped: {shown(error)}{kept}{other}")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        sys.exit(f"\nstopped: out of memory{kept} (--micro-batch-tokens, --engine-memory: less)")
    in_text = any(f"os error {code}" in str(error) for code in FULL)  # of a library in Rust
    if getattr(error, "errno", None) in FULL or in_text:
        sys.exit(f"\nstopped: the disk is full ({error}){kept}, when there is space again")
    inside = isinstance(error, OSError) and error.filename is not None
    if inside and Path(error.filename).absolute().is_relative_to(path.absolute()):
        sys.exit(f"\nstopped: {error.filename}: {error.strerror}{kept}")
    raise error


def discard(run) -> None:
    """Remove what a run left unfinished, and its new directory where nothing was kept in it."""
    if run.path and processes.rank() == 0:
        for left in ("engine", "checkpoints/draft"):
            shutil.rmtree(run.path / left, ignore_errors=True)
    if not run.began or rows_of(run.path / "metrics.jsonl") or any(run.path.glob("batch-*.json")):
        return
    for name in "args.json run.json metrics.jsonl episodes.jsonl eval_episodes.jsonl lock".split():
        (run.path / name).unlink(missing_ok=True)
    shutil.rmtree(run.path / "pictures", ignore_errors=True)
    for made in reversed(run.began):
        with contextlib.suppress(OSError):  # somebody else's file is in it
            made.rmdir()
