"""Models and data by their names on the Hugging Face Hub, and their files on this machine.

    Qwen/Qwen3-0.6B                     a model
    openai/gsm8k:main:train             data: config and split; without, the only config and train
    someone/maths:data/*.jsonl          data: files of the repository
    openai/gsm8k@COMMIT:main:train      the same at a commit, branch or tag

What is on this machine under that path wins. Files come into the cache of huggingface_hub, which is
used as it is with HF_HUB_OFFLINE=1. It is imported only where there is such a name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from roll_lite.chat_template import BESIDE_TOKENIZER, TOKENIZER_FILES
from roll_lite.checks import UserError
from roll_lite.files import read_json_object

INDEX = "model.safetensors.index.json"
CONFIG_FILES = (*TOKENIZER_FILES, *BESIDE_TOKENIZER)
"""Files of a model that options are checked with: kilobytes, or a few megabytes."""
MODEL_FILES = ("model*.safetensors", INDEX, *CONFIG_FILES)
FROM_HUB = "from_hub"
"""The option of a recipe that has names, and what they stand for."""
DATA_SUFFIXES = (".jsonl", ".json", ".parquet")
CONVERTED = "refs/convert/parquet"
"""The branch where the Hub keeps all data sets as CONFIG/SPLIT/NUMBER.parquet."""
_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:@([^:@]+))?")
_DATA_NAME = re.compile(rf"{_NAME.pattern}(?::(.+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(rf"/models--([^/]+?)--([^/]+)/snapshots/({_COMMIT.pattern})")


class DataName(NamedTuple):
    repo: str
    revision: str | None
    part: str
    """CONFIG, CONFIG:SPLIT, a file or a pattern of files; perhaps empty."""

    @property
    def is_of_files(self) -> bool:
        return self.part.endswith(DATA_SUFFIXES)

    @property
    def pattern(self) -> str:
        """Pattern of the files, once config and split are known."""
        return self.part if self.is_of_files else f"{self.part.replace(':', '/')}/*.parquet"


def is_model_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text)) and not Path(text).exists()


def is_data_name(text: str) -> bool:
    """Whether text, without a weight, has the form of a name of data on the Hub."""
    found = _DATA_NAME.fullmatch(text)
    is_file = text.endswith(DATA_SUFFIXES) and ":" not in text
    return bool(found) and not is_file and not Path(text).exists()


def parse_data_name(text: str) -> DataName:
    repo, revision, part = _DATA_NAME.fullmatch(text).groups()
    return DataName(repo, revision, part or "")


def is_pinned(text: str) -> bool:
    """Whether a name of data says all: its commit, and config and split or files."""
    name = parse_data_name(text)
    is_whole = name.is_of_files or ":" in name.part
    return is_whole and bool(_COMMIT.fullmatch(name.revision or ""))


def data_label(source: str) -> str:
    """A source without its commit, for errors, ids and orders that no commit changes."""
    if not is_data_name(source):
        return source
    name = parse_data_name(source)
    return f"{name.repo}:{name.part}" if name.part else name.repo


def model_folder(name: str) -> str:
    """The folder of a model in the cache, which ends with its commit; what is missing there is
    downloaded."""
    folder = config_folder(name)
    download_weights(folder)
    return folder


def config_folder(name: str) -> str:
    """The folder of `model_folder`, without the weights unless they are there already."""
    repo, revision = _NAME.fullmatch(name).groups()
    return _snapshot("model", repo, revision, CONFIG_FILES)


def snapshot_name(folder: str | Path) -> str:
    """The name, with its commit, of a folder in the cache; empty for any other folder."""
    found = _SNAPSHOT.search(str(Path(folder).absolute()))
    return "{}/{}@{}".format(*found.groups()) if found else ""


def local_folder(model: str, *, with_weights: bool) -> str:
    """What a user named as a model's folder: that folder, or the one that a name stands for. A
    folder of the cache that has gone is downloaded again."""
    name = snapshot_name(model) or (model if is_model_name(model) else "")
    if not name:
        return model
    is_there = (Path(model) / "config.json").is_file()
    folder = model if is_there else config_folder(name)
    if with_weights:
        download_weights(folder)
    return folder


def download_weights(folder: str) -> None:
    """The weights that a folder of the cache lacks: all, or what a killed download left out."""
    if not missing_weights(folder):
        return
    repo, revision = _NAME.fullmatch(snapshot_name(folder)).groups()
    _snapshot("model", repo, revision, MODEL_FILES)
    if missing := missing_weights(folder):
        raise UserError(
            f"{folder} has no {_some(missing)}; fill the cache by `hf download {repo} --revision "
            f"{revision}` where there is a network, or take a model that has safetensors"
        )


def snapshots(options: Mapping[str, Any]) -> list[str]:
    """The folders of the cache in flat options of a recipe, which had names in their place."""
    return sorted({*filter(snapshot_name, options.get(FROM_HUB, {}).values())})


def missing_weights(folder: str | Path) -> list[str]:
    """Files of weights that a model's folder should have and has not."""
    names = ["model.safetensors"]
    index = Path(folder, INDEX)
    if index.is_file():
        files = read_json_object(index).get("weight_map")
        names = sorted({str(file) for file in files.values()}) if isinstance(files, dict) else []
    return [name for name in names if not Path(folder, name).is_file()]


def pinned_data(source: str) -> str:
    """The name of data with its commit, and its config and split or its files."""
    name = parse_data_name(source)
    commit, files = _listing(name)
    if name.is_of_files:
        if not any(fnmatch(file, name.part) for file in files):
            raise UserError(f"{name.repo} has no file {name.part}; it has {_some_data(files)}")
        return f"{name.repo}@{commit}:{name.part}"
    splits: dict[str, list[str]] = {}
    for config, split, _ in (file.split("/") for file in files if _is_converted(file)):
        splits.setdefault(config, []).append(split)
    config, _, split = name.part.partition(":")
    config = config or (next(iter(splits)) if len(splits) == 1 else "default")
    split = split or "train"
    if split not in splits.get(config, ()):
        known = sorted({f"{name.repo}:{c}:{s}" for c, found in splits.items() for s in found})
        raise UserError(
            f"there is no config {config!r} with a split {split!r}; use {_some(known)}"
            if known
            else f"the Hugging Face Hub has no parquet files of {name.repo}; name files, as "
            f"{name.repo}:FILE"
        )
    return f"{name.repo}@{commit}:{config}:{split}"


@cache
def data_files(source: str) -> tuple[Path, ...]:
    """The files of a source: the file itself, or those of a name, which are downloaded."""
    if not is_data_name(source):
        return (Path(source),)
    if not is_pinned(source):
        return data_files(pinned_data(source))
    name = parse_data_name(source)
    folder = Path(_snapshot("dataset", name.repo, name.revision, [name.pattern]))
    files = [file for file in _files_in(folder) if fnmatch(file, name.pattern)]
    if not files:
        raise UserError(f"{source} names no file: {name.repo} has no {name.pattern} there")
    return tuple(folder / file for file in files)


def _snapshot(kind: str, repo: str, revision: str | None, patterns: Sequence[str]) -> str:
    with _explained(kind, repo, revision):
        from huggingface_hub import snapshot_download

        return snapshot_download(
            repo, repo_type=kind, revision=revision, allow_patterns=list(patterns)
        )


def _listing(name: DataName) -> tuple[str, list[str]]:
    """The commit and the files of data; without the Hub, of what the cache has of them."""
    revision = name.revision or (None if name.is_of_files else CONVERTED)
    with _explained("dataset", name.repo, revision):
        from huggingface_hub import HfApi, constants, errors
        from huggingface_hub.file_download import repo_folder_name

        try:
            info = HfApi().repo_info(name.repo, repo_type="dataset", revision=revision)
            return info.sha, [file.rfilename for file in info.siblings]
        except errors.HfHubHTTPError:
            raise
        except (OSError, errors.HTTPError) as error:
            folder = repo_folder_name(repo_id=name.repo, repo_type="dataset")
            cached = Path(constants.HF_HUB_CACHE, folder, "snapshots").glob("*")
            for snapshot in sorted(cached, key=lambda path: path.stat().st_mtime, reverse=True):
                files = _files_in(snapshot)
                is_it = name.revision in (None, snapshot.name) and any(
                    fnmatch(file, name.part) if name.is_of_files else _is_converted(file)
                    for file in files
                )
                if is_it:
                    return snapshot.name, files
            raise errors.LocalEntryNotFoundError(str(error)) from error


@contextmanager
def _explained(kind: str, repo: str, revision: str | None) -> Iterator[None]:
    """Errors of the Hub as what the user can do about them."""
    from huggingface_hub import constants, errors

    place = constants.ENDPOINT
    hint = "" if kind == "dataset" else "make a model by `roll-lite tiny FOLDER`, "
    page = f"{place}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    try:
        yield
    except errors.GatedRepoError:
        raise UserError(
            f"{repo} is gated: ask for access at {page}, and set HF_TOKEN to a token of the "
            "account that has it"
        ) from None
    except errors.RevisionNotFoundError:
        lacks = f"has no revision {revision!r}" + (
            ": the Hugging Face Hub has not converted it; name its files, as OWNER/NAME:FILE"
            if revision == CONVERTED
            else f"; {page}/tree/main lists them"
        )
        raise UserError(f"{repo} {lacks}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{repo} is neither on this machine nor a {kind} at {place}; mind the spelling, {hint}"
            "or set HF_TOKEN for a private one"
        ) from None
    except errors.HfHubHTTPError as error:
        raise UserError(
            f"{place} refused {repo} ({error!s:.300}); try again, or set HF_TOKEN"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        option = f" --repo-type {kind}" if kind == "dataset" else ""
        command = f"`hf download {repo}{option}` where there is a network"
        why = (
            "HF_HUB_OFFLINE=1 forbids downloading it"
            if constants.HF_HUB_OFFLINE
            else f"{place} cannot be reached ({error.__cause__ or error!s:.200})"
        )
        raise UserError(
            f"{repo} is neither on this machine nor whole in the cache {constants.HF_HUB_CACHE}, "
            f"and {why}; {hint}or fill the cache by {command}"
        ) from error
    except errors.HTTPError as error:
        raise UserError(
            f"{repo}: {place} cannot be reached ({type(error).__name__}: {error!s:.200}); what was "
            "downloaded is kept, so try again"
        ) from error


def _files_in(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def _is_converted(file: str) -> bool:
    return file.count("/") == 2 and file.endswith(".parquet")


def _some_data(files: Sequence[str]) -> str:
    return _some([file for file in files if file.endswith(DATA_SUFFIXES)])


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "none of .jsonl, .json and .parquet") + rest
