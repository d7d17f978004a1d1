"""The one exception that users are meant to read, and others' words for use in it."""


class UserError(ValueError):
    """Something the user gave cannot be used.

    The message is one line: what was got, what was expected, what to do about it. The command line prints it and
    exits with 2; nodes show it on the node, under the name `qwen21.UserError` wherever the pack lies.
    """

    __module__ = "qwen21"  # ComfyUI heads an error with module and name, and loads a pack under its whole path


class Cancelled(Exception):
    """Raised by a `check_cancel` callback to stop a run between two steps or two blocks."""


def first_line(error: BaseException) -> str:
    """What another library's exception says in its first line, at most 200 characters; its type if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
