"""What a model folder says of conversations: its tokenizer, chat template and stop tokens."""

import json
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.meta

from roll_lite.checks import UserError
from roll_lite.files import check_is_file, read_json_object
from roll_lite.types import SHAPE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATE = date(2024, 7, 26)
"""What templates write that show today's date: a run, its resumption and the evaluation of its
model read the same. It is the date that Llama's templates fall back to."""
BESIDE_TOKENIZER = (
    "config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
TEMPLATE_BYTES, TEMPLATE_TEXT = 2**30, 2**20
"""Memory that a template may take when it is tried on a short conversation, and characters that it
may write."""
NOT_ARGUMENTS = {
    "messages", "add_generation_prompt", "raise_exception", "strftime_now", "namespace",
    "bos_token", "eos_token", "unk_token", "pad_token",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Chat template."""

    system: str | None = None
    """System message for conversations that have none."""
    template_args: tuple[str, ...] | None = None
    """NAME=VALUE that the model's chat template reads, as in enable_thinking=false."""

    def __post_init__(self):
        for entry in self.template_args or ():
            if not re.match(r"\w+=", entry):
                raise UserError(
                    f"template_args={entry!r} is not NAME=VALUE, as in enable_thinking=false"
                )
            if entry.startswith("system="):
                raise UserError(f"template_args={entry!r}: give a system message as system=TEXT")

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of Chat."""
        pairs = (entry.split("=", 1) for entry in self.template_args or ())
        arguments = {name: _parse_value(text) for name, text in pairs}
        return arguments | ({"system": self.system} if self.system else {})


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a folder; nothing is read from the Hugging Face Hub. A shape, whose weights
    are random, has that of the tiny model."""
    if str(folder).startswith(SHAPE):
        from roll_lite.characters import character_tokenizer

        return character_tokenizer()
    if not folder.is_dir():
        raise UserError(
            f"{folder} is not a folder; give a Hugging Face folder on this machine, or make one: "
            "`roll-lite tiny FOLDER`"
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{folder} has no tokenizer; copy tokenizer.json and tokenizer_config.json of its "
            "model into it"
        )
    # Not above: its import takes 1.2 s, and ranks without a tokenizer need not wait for it.
    from transformers import AutoTokenizer

    for name in (*TOKENIZER_FILES, *BESIDE_TOKENIZER):
        check_is_file(folder / name)
    try:  # the code of a folder is never run, and the user is not asked to allow it
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of any kind, as the file that is damaged
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            raise UserError(
                f"the tokenizer of {folder} is code of its own, which roll_lite does not run; take "
                "a model whose tokenizer transformers knows"
            ) from None
        raise UserError(
            f"the tokenizer of {folder} cannot be read ({type(error).__name__}: {error!s:.500}); "
            "copy or download its files again"
        ) from error
    if not tokenizer.chat_template:
        raise UserError(
            f"the tokenizer of {folder} has no chat template; take the model's chat variant, "
            "or put a chat_template.jinja into the folder"
        )
    return tokenizer


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Patterns of special tokens, some of which take the space around them; the longest first."""
    added = (token for token in tokenizer.added_tokens_decoder.values() if token.special)
    return {
        token.content: r"\s*" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip
        for token in sorted(added, key=lambda token: -len(token.content))
    }


def stop_ids(folder: Path, *ids: int | None) -> tuple[int, ...]:
    """The given ids, then those of the folder's generation config."""
    path = folder / "generation_config.json"
    configured = read_json_object(path).get("eos_token_id") if path.exists() else None
    more = configured if isinstance(configured, list) else [configured]
    if not all(i is None or type(i) is int for i in more):
        raise UserError(f"{path} has eos_token_id={configured!r:.80}; give one id or a list of ids")
    return tuple(dict.fromkeys(i for i in [*ids, *more] if i is not None))


def _parse_value(text: str) -> Any:
    """A truth value, another JSON value, or plain text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def check_arguments(arguments: dict[str, Any], template: str, folder: str | Path) -> None:
    """Refuse arguments that the template does not read."""
    try:
        read = _variables(template) - NOT_ARGUMENTS
    except (jinja2.TemplateSyntaxError, RecursionError) as error:
        raise UserError(
            f"the chat template of {folder} is not Jinja: {error}; copy or download it again"
        ) from None
    if unread := sorted(set(arguments) - read):
        raise UserError(
            f"template_args names {unread[0]!r}, which the chat template of {folder} does not "
            f"read; it reads {', '.join(sorted(read)) or 'no arguments'}"
        )


def _variables(template: str) -> set[str]:
    """Names that a template looks up, among them a few that it sets itself."""
    plain = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", template)  # a tag of transformers
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    return jinja2.meta.find_undeclared_variables(environment.parse(plain))


def with_fixed_date(template: str) -> str:
    """The template with DATE where it writes today's."""
    call = r"""strftime_now\((["'])(.*?)\1\)"""
    return re.sub(call, lambda found: repr(DATE.strftime(found[2])), template)


def try_template(folder: str | Path, render: Callable[[], str]) -> None:
    """Refuse the template of a folder if it fails, fills the memory or writes without end."""
    with _bounded_memory(folder):
        try:
            text = render()
        except (UserError, MemoryError):
            raise
        except Exception as error:  # of any kind: templates are code
            raise UserError(
                f"the chat template of {folder} fails on a short conversation "
                f"({type(error).__name__}: {error}); copy or download it again"
            ) from error
    if len(text) > TEMPLATE_TEXT:
        raise UserError(
            f"the chat template of {folder} makes {len(text):,} characters of a short "
            "conversation; take the model from a source you trust"
        )


@contextmanager
def _bounded_memory(folder: str | Path) -> Iterator[None]:
    """Jinja's sandbox keeps a template from files and code, not from memory. The limit is that of
    the process, so it is there for a moment only."""
    usage = Path("/proc/self/statm")
    if not usage.exists():  # not Linux
        yield
        return
    before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(usage.read_text().split()[5]) * resource.getpagesize() + TEMPLATE_BYTES
    known = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([limit, *known]), hard))
    try:
        yield
    except MemoryError:
        raise UserError(
            f"the chat template of {folder} takes more than {TEMPLATE_BYTES >> 20:,} MiB of memory "
            "for a short conversation; take the model from a source you trust"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
