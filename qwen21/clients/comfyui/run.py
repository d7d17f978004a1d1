"""The command `run`: execute a workflow file on a running ComfyUI and save its outputs to a folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...atomic_write import write_new
from ...errors import UserError
from .follow import Follower
from .messages import can_listen
from .server import Server, ServerError
from .workflow import Workflow

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
UNHEARD = (
    "without the package websocket-client neither the run's steps nor outputs that ComfyUI blocks are seen; "
    "pip install websocket-client"
)
LONGEST_DETAIL = 300  # characters; a combo's list of values can be longer than a screen


@dataclass(frozen=True)
class WorkflowJob:
    """Arguments of the command. `settings` are NODE.INPUT=VALUE and `images` NODE.INPUT=FILE, as written."""

    file: Path
    server: str
    settings: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    out: Path = Path(".")
    verbose: bool = False


def run(job: WorkflowJob, progress_bar: Callable[[], Any]) -> int:
    """Run a job and print the paths of its outputs; return the exit code. Raises `UserError` before the run starts."""
    workflow = Workflow.read(job.file)
    settings = [workflow.setting(text) for text in job.settings]
    pictures = [workflow.picture(text) for text in job.images]
    _check_files(pictures)
    _check_folder(job.out)
    server = Server(job.server)
    server.check()
    for node, name, value in settings:
        _check_input(server, workflow, node, name)
        workflow.set(node, name, value)
    for node, name, file in pictures:
        _check_input(server, workflow, node, name)
        workflow.set(node, name, server.upload(file))
    prompt_id = str(uuid.uuid4())  # chosen here, so that the run can be cancelled from its first moment
    try:
        return _run(job, server, workflow, prompt_id, progress_bar)
    except KeyboardInterrupt:
        with contextlib.suppress(UserError):
            server.cancel(prompt_id)
        print("qwen21: interrupted, and cancelled on the server", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ServerError as error:
        print(f"qwen21: {error}", file=sys.stderr)
        return EXIT_FAILED


def _run(job: WorkflowJob, server: Server, workflow: Workflow, prompt_id: str, progress_bar: Callable[[], Any]) -> int:
    client_id = uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        socket = None
        if can_listen():
            with contextlib.suppress(OSError):  # without messages the server is polled
                socket = stack.enter_context(server.listen(client_id))
        else:
            print(f"qwen21: warning: {UNHEARD}", file=sys.stderr)
        answer = server.post(workflow.nodes, client_id, prompt_id)
        if answer.get("error") or answer.get("node_errors"):
            server.cancel(prompt_id)  # the server runs a workflow if at least one of its outputs is valid
            raise UserError(f"the server refuses the workflow: {_refusal(workflow, answer)}")
        bar = stack.enter_context(progress_bar())
        follower = Follower(server, socket, workflow, prompt_id, bar)
        entry = follower.wait()
    outputs = entry.get("outputs") or {}
    if job.verbose:
        _print_texts(workflow, outputs)
    saved = [_save(server, file, job.out) for file in _files(outputs)]
    for line, traceback in zip(follower.errors, follower.tracebacks, strict=True):
        print(f"qwen21: {line}", file=sys.stderr)
        if job.verbose and traceback:
            print(traceback, file=sys.stderr)
    if not saved and not follower.errors:
        print("qwen21: the workflow ran and put out no file", file=sys.stderr)
    return EXIT_FAILED if follower.errors else 0


def _check_files(pictures: list[tuple[str, str, Path]]) -> None:
    for _, _, file in pictures:
        if not file.is_file():
            raise UserError(f"--image {file}: no such file; give a picture")


def _check_folder(folder: Path) -> None:
    folder = folder.absolute()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"--out {folder}: {nearest} is a file, expected a folder")
    if not os.access(nearest, os.W_OK):
        raise UserError(f"--out {folder}: {nearest} cannot be written to; write elsewhere")


def _check_input(server: Server, workflow: Workflow, node: str, name: str) -> None:
    """Ask the server whether `node` has the input `name`, where the workflow leaves it out."""
    content = workflow.nodes[node]
    if name in content["inputs"]:
        return
    known = server.inputs_of(content["class_type"]) or list(content["inputs"])
    if name not in known:
        raise UserError(f"{workflow.label(node)} has no input {name!r}; it has {', '.join(known) or 'none'}")


def _refusal(workflow: Workflow, answer: dict[str, Any]) -> str:
    """Format the server's `error` and `node_errors` as one line."""
    reasons = []
    for node, found in (answer.get("node_errors") or {}).items():
        told = [_told(error) for error in found.get("errors", [])]
        reasons.append(f"{workflow.label(node, found.get('class_type', ''))}: {', '.join(told)}")
    error = answer.get("error")
    return "; ".join(reasons) or (_told(error) if isinstance(error, dict) else str(error))


def _told(error: dict[str, Any]) -> str:
    message, details = (" ".join(str(error.get(key) or "").split()) for key in ("message", "details"))
    if len(details) > LONGEST_DETAIL:
        details = details[: LONGEST_DETAIL - 3] + "..."
    return f"{message} ({details})" if details else message


def _files(outputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every file that a node put out, whatever key the node uses: images, gifs, audio."""
    for node in outputs.values():
        for value in node.values():
            for item in value if isinstance(value, list) else ():
                if isinstance(item, dict) and isinstance(item.get("filename"), str):
                    yield item


def _print_texts(workflow: Workflow, outputs: dict[str, Any]) -> None:
    for node, content in outputs.items():
        texts = content.get("text", ())
        for text in [texts] if isinstance(texts, str) else texts:
            print(f"qwen21: {workflow.label(node)} says: {text}", file=sys.stderr)


def safe_name(name: str) -> str:
    """Base name of a file that the server names: never outside of our folder, never hidden."""
    base = re.sub(r'[\x00-\x1f<>:"|?*]', "_", re.split(r"[/\\]", name)[-1])
    return base.strip(". ") or "output"


def _save(server: Server, file: dict[str, Any], folder: Path) -> Path:
    """Fetch one output, save it, and print its path."""
    data = server.view(file)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = write_new(_paths(folder, safe_name(file["filename"])), data)
    except OSError as error:
        raise ServerError(f"{folder}: cannot be made ({error.strerror})") from error
    except UserError as error:
        raise ServerError(str(error)) from error
    print(path)
    return path


def _paths(folder: Path, name: str) -> Iterator[Path]:
    """Yield `name`, then `name` with -1, -2, ... after its stem."""
    stem, suffix = Path(name).stem, Path(name).suffix
    return (folder / (f"{stem}-{number}{suffix}" if number else name) for number in itertools.count())
