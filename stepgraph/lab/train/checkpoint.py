"""Checkpoints that are whole or absent, and that run no code when they are loaded.

A checkpoint is a folder, `step_00000100`:

| file | written by | contents |
|---|---|---|
| `shard_00000.json`, `shard_00000.pt` | the first rank with these stages of the model | model, optimizer, scheduler; \
of a pipeline, the names that the stages' tensors have in the whole model |
| `rank_00000.json`, `rank_00000.pt` | every rank | random states, position in the data |
| `config.json` | rank 0 | the configuration |
| `manifest.json` | rank 0, last | step, number of ranks, size and SHA-256 of every file, and its own SHA-256 |

Tensors are stored as safetensors if that is installed (`.safetensors`), else by `torch.save` and read back with
`weights_only=True`. The rest is JSON (`plain_state`).

All files are written to `step_00000100.partial` and flushed to the disk. When every rank is done, rank 0 writes the
manifest and renames the folder, which the file system does at once or not at all. So a run that is killed, or a disk
that is full, leaves a `.partial` folder that nothing reads and the next save removes. Earlier checkpoints are never
opened for writing.

One run at a time saves to a folder: the first rank holds a lock on `.stepgraph-lock` there, which ends with its
process. Else each run would take the other's `.partial` folder for one that was left behind, and remove it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from stepgraph.core.errors import StepgraphError
from stepgraph.lab.train.plain_state import join, split
from stepgraph.lab.train.ranks import Ranks

_FORMAT, _MANIFEST, _CONFIG, _PARTIAL = "stepgraph-checkpoint-1", "manifest.json", "config.json", ".partial"
_NAME = re.compile(r"step_([0-9]{8,18})")
_LOCK, _OWN_DIGEST = ".stepgraph-lock", "sha256"


class CheckpointError(StepgraphError, RuntimeError):
    """A checkpoint that could not be written, or must not be read."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A loaded checkpoint."""

    path: Path
    step: int
    shard: dict[str, Any]
    rank: dict[str, Any]
    config: Any


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a loaded checkpoint, by the names that they have in the whole model."""

    path: Path
    tensors: dict[str, torch.Tensor]


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Return the finished checkpoints of a folder with their steps, the earliest first."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(name[1]), path) for name, path in found if name is not None and path.is_dir())


def refuse_later_checkpoints(folder: Path, start: int) -> None:
    """Refuse to save to a folder with checkpoints of later steps: a resumed run would take one of those."""
    later = [path for step, path in checkpoints_in(folder) if step > start]
    if later:
        if not (later[-1] / _MANIFEST).is_file():
            raise CheckpointError(
                f"{folder} has a folder {later[-1].name} without a {_MANIFEST} of ours",
                rule="checkpoint-folder",
                why="by its name it is a checkpoint of a later step, and a resumed run would take it for the latest.",
                fix="move that folder away, or save to another one.",
            )
        raise CheckpointError(
            f"{folder} has checkpoints of another run that went further: {later[-1].name}",
            rule="checkpoint-folder",
            why=f"this run starts at step {start}, and resuming takes the latest checkpoint of a folder.",
            fix=f"resume with checkpoint.load={folder}, or save to another folder.",
        )


@contextlib.contextmanager
def held(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Create the folder to save to, write to it, and keep other runs out of it; every rank must enter."""
    with contextlib.ExitStack() as stack:
        error = _attempt(lambda: _try_folder(folder, ranks, stack))
        failed = ranks.largest(ranks.rank + 1 if error is not None else 0)
        if isinstance(error, CheckpointError):
            raise error
        if failed:
            raise CheckpointError(
                f"checkpoints cannot be saved to {folder}: {f'rank {failed - 1} failed' if error is None else error}",
                rule="checkpoint-write",
                why="the run was asked to save there, and would lose what it trains.",
                fix="make the folder writable, or save to another one with checkpoint.save=PATH.",
            ) from error
        yield


def _try_folder(folder: Path, ranks: Ranks, stack: contextlib.ExitStack) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".probe_{ranks.rank:05d}"
    probe.write_bytes(b"")
    probe.unlink()
    if ranks.is_first and importlib.util.find_spec("fcntl") is not None:
        _lock(folder, stack.enter_context((folder / _LOCK).open("a+", encoding="utf-8")))


def _lock(folder: Path, file: TextIO) -> None:
    """Lock an open file until it is closed, or its process ends; refuse one that another run has locked."""
    import fcntl  # not everywhere

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise CheckpointError(
            f"another run saves to {folder}: {file.read(200).strip() or 'it has locked the folder'}",
            rule="checkpoint-folder",
            why="each of the two would remove what the other one is about to write.",
            fix="save to another folder with checkpoint.save=PATH, or wait until that run has ended.",
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system that has no locks
            raise
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def keep_most_recent(folder: Path, count: int) -> list[str]:
    """Remove all checkpoints of a folder but the last ones; return what could not be removed.

    Only the files that a manifest of ours lists are removed. A folder without one, one that does not fit its manifest
    and a link are nobody's business here, and do not count.
    """
    found: list[tuple[Path, dict[str, Any]]] = []
    for _, path in checkpoints_in(folder):
        if not path.is_symlink():
            with contextlib.suppress(CheckpointError, OSError):
                found.append((path, _read_manifest(path)))
    kept = []
    for path, manifest in found[:-count]:
        try:
            for name in (_MANIFEST, *manifest["files"]):
                (path / name).unlink()
            path.rmdir()
        except OSError as error:
            kept.append(f"{path} was not removed: {error}")
    return kept


# -- saving


def save(folder: Path, step: int, *, shard: Any, rank: Any, config: Any, ranks: Ranks) -> Path:
    """Write a checkpoint; every rank must call it. Return its folder, which exists only if all of it was written."""
    final = folder / f"step_{step:08d}"
    partial = final.with_name(final.name + _PARTIAL)
    error = None
    if ranks.is_first:
        error = _attempt(lambda: _begin(folder, final, partial))
    _all_or_none(error, final, partial, ranks)
    error = _attempt(lambda: _write_own(partial, shard, rank, config, ranks))
    _all_or_none(error, final, partial, ranks)
    if ranks.is_first:
        error = _attempt(lambda: _finish(partial, final, step, ranks))
    _all_or_none(error, final, partial, ranks)
    return final


def _begin(folder: Path, final: Path, partial: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if final.exists():
        raise FileExistsError(f"{final} exists already")
    for stale in folder.iterdir():
        if stale.name.endswith(_PARTIAL) and _NAME.fullmatch(stale.name.removesuffix(_PARTIAL)) and stale.is_dir():
            shutil.rmtree(stale)
    partial.mkdir()


def _write_own(partial: Path, shard: Any, rank: Any, config: Any, ranks: Ranks) -> None:
    parts = {f"rank_{ranks.rank:05d}": rank}
    if ranks.data_rank == 0:
        parts[f"shard_{ranks.stage:05d}"] = shard
    names = []
    for name, state in parts.items():
        value, tensors = split(state)
        names += [_write_json(partial / f"{name}.json", value), _write_tensors(partial / name, tensors)]
    if ranks.is_first:
        names.append(_write_json(partial / _CONFIG, config))
    digests = {name: _digest(partial / name) for name in names}
    _write_json(partial / f"files_{ranks.rank:05d}.json", digests)


def _finish(partial: Path, final: Path, step: int, ranks: Ranks) -> None:
    files: dict[str, Any] = {}
    for rank in range(ranks.size):
        listed = partial / f"files_{rank:05d}.json"
        files |= json.loads(listed.read_text())
        listed.unlink()
    layout = {"world_size": ranks.size, "pipeline_size": ranks.pipeline_size}
    manifest = {"format": _FORMAT, "step": step, **layout, "files": files}
    _write_json(partial / _MANIFEST, manifest | {_OWN_DIGEST: digest_of(manifest)})
    _flush_folder(partial)
    partial.rename(final)
    _flush_folder(final.parent)


def _attempt(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except (OSError, RuntimeError, StepgraphError) as error:  # torch reports a full disk as a RuntimeError
        return error
    return None


def _all_or_none(error: Exception | None, final: Path, partial: Path, ranks: Ranks) -> None:
    """Raise on every rank if one of them failed."""
    failed = ranks.largest(ranks.rank + 1 if error is not None else 0)
    if not failed:
        return
    if ranks.is_first:
        shutil.rmtree(partial, ignore_errors=True)
    earlier = checkpoints_in(final.parent)
    intact = f"the last good checkpoint is {earlier[-1][1]}." if earlier else "there is no earlier checkpoint."
    reason = f"rank {failed - 1} failed" if error is None else str(error)
    raise CheckpointError(
        f"the checkpoint {final} was not written: {reason}",
        rule="checkpoint-write",
        why=f"every file must be on the disk before a checkpoint gets its name; {intact}",
        fix="free space on the device, or save to another folder with checkpoint.save=PATH.",
    ) from error


def _write_json(path: Path, value: Any) -> str:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    return path.name


def _write_tensors(stem: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write tensors without their aliases; tensors that share memory are stored once each."""
    whole = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    write: Callable[[Any], Any]
    if importlib.util.find_spec("safetensors") is not None:
        to_bytes = importlib.import_module("safetensors.torch").save
        path, write = stem.with_name(stem.name + ".safetensors"), lambda file: file.write(to_bytes(whole))
    else:
        path, write = stem.with_name(stem.name + ".pt"), lambda file: torch.save(whole, file)
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    return path.name


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest, without the field that holds it."""
    rest = {name: value for name, value in manifest.items() if name != _OWN_DIGEST}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _flush_folder(path: Path) -> None:
    """Flush a folder's list of names, where the system can."""
    with contextlib.suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# -- loading


def load(path: Path, ranks: Ranks) -> Saved:
    """Load a checkpoint, or the latest one of a folder; refuse one that is damaged, or of another number of ranks.

    Unfinished `.partial` folders are ignored.
    """
    path, manifest = _open(path)
    _check_ranks(path, manifest, ranks)
    files = manifest["files"]
    shard, rank = (_state(path, name, files) for name in (f"shard_{ranks.stage:05d}", f"rank_{ranks.rank:05d}"))
    return Saved(path, manifest["step"], shard, rank, _read_json(path, _CONFIG, files))


def load_weights(path: Path) -> Weights:
    """Load the weights of a checkpoint, or of the latest one of a folder, whatever number of ranks has saved it.

    Files are mapped into memory: what a rank does not use of them takes none.
    """
    path, manifest = _open(path)
    found: dict[str, torch.Tensor] = {}
    for stage in range(manifest["pipeline_size"]):
        name = f"shard_{stage:05d}"
        shard = _state(path, name, manifest["files"], mapped=True)
        model, names = shard.get("model"), shard.get("names")
        if not isinstance(model, dict):
            raise _damaged(path, f"{name}.json", "it has no weights")
        if names is None and manifest["pipeline_size"] > 1:
            raise CheckpointError(
                f"{path} does not say which part of the model its {manifest['pipeline_size']} pipeline ranks had",
                rule="checkpoint",
                why="an older version of stepgraph saved it, and the names of stages are not those of a whole model.",
                fix=f"resume it once with checkpoint.load={path} on as many ranks, and save it again.",
            )
        if names is not None and not (isinstance(names, dict) and names.keys() == model.keys()):
            raise _damaged(path, f"{name}.json", "it does not name all weights")
        for own, tensor in model.items():
            found |= dict.fromkeys(names[own] if names is not None else (own,), tensor)
    return Weights(path, found)


def _open(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return a checkpoint, or the latest one of a folder, with its manifest; refuse files that it does not list."""
    try:
        if not (path / _MANIFEST).is_file() and _NAME.fullmatch(path.name) is None:
            found = checkpoints_in(path)
            if not found:
                raise _no_checkpoint(path)
            path = found[-1][1]
        if not path.is_dir():
            raise _no_checkpoint(path)
        manifest = _read_manifest(path)
        unknown = sorted({file.name for file in path.iterdir()} - {*manifest["files"], _MANIFEST})
    except OSError as error:  # no right to read it, a name that is too long
        raise _no_checkpoint(path, f": {error}") from error
    if unknown:
        raise _damaged(path, unknown[0], "the manifest does not list it")
    return path, manifest


def _no_checkpoint(path: Path, detail: str = "") -> CheckpointError:
    is_other = not detail and path.exists() and not path.is_dir()
    return CheckpointError(
        f"{path} {'is not a folder' if is_other else 'has no checkpoint'}{detail}",
        rule="checkpoint",
        why="a checkpoint is a folder step_00000100 with a manifest.json; unfinished ones are ignored.",
        fix="pass the folder that checkpoint.save named, or leave the setting out to start anew.",
    )


def _state(path: Path, name: str, files: Mapping[str, Any], *, mapped: bool = False) -> dict[str, Any]:
    """Return the state in a file of JSON and one of tensors."""
    listed = [file for file in files if file.startswith(f"{name}.") and not file.endswith(".json")]
    if f"{name}.json" not in files or len(listed) != 1:
        raise _damaged(path, f"{name}.json", "the manifest does not list it with its tensors")
    return _joined(path, f"{name}.json", files, _read_tensors(path, listed[0], files, mapped))


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest = _parsed(path, _MANIFEST)
    is_ours = isinstance(manifest, dict) and manifest.get("format") == _FORMAT
    kinds = {"step": int, "world_size": int, "pipeline_size": int, "files": dict}
    if not is_ours or any(type(manifest.get(name)) is not kind for name, kind in kinds.items()):
        raise _damaged(path, _MANIFEST, f"it is not a manifest of {_FORMAT}")
    found: dict[str, Any] = manifest
    if found.get(_OWN_DIGEST) != digest_of(found):
        raise _damaged(path, _MANIFEST, "its contents changed since it was saved (SHA-256)")
    named = _NAME.fullmatch(path.name)
    if named is not None and int(named[1]) != found["step"]:
        raise _damaged(path, _MANIFEST, f"it is of step {found['step']}, and the folder of step {int(named[1])}")
    for name, entry in found["files"].items():
        if Path(name).name != name or not isinstance(entry, dict):
            raise _damaged(path, _MANIFEST, f"it lists {name!r}")
        if not (path / name).is_file():
            raise _damaged(path, name, "it is not a file" if (path / name).exists() else "it is missing")
        size = (path / name).stat().st_size
        if size != entry.get("bytes"):
            raise _damaged(path, name, f"it has {size} bytes, and the manifest says {entry.get('bytes')}")
    return found


def _check_ranks(path: Path, manifest: Mapping[str, Any], ranks: Ranks) -> None:
    saved, now = (manifest["world_size"], manifest["pipeline_size"]), (ranks.size, ranks.pipeline_size)
    if saved != now:
        raise CheckpointError(
            f"{path} was saved by {saved[0]} ranks (pipeline of {saved[1]}), and this run has {now[0]} ({now[1]})",
            rule="checkpoint-ranks",
            why="random states and the position in the data belong to a rank, and stages to a place in the pipeline.",
            fix=f"start with torchrun --nproc-per-node={saved[0]} and the same pipeline_model_parallel_size.",
        )


def _parsed(path: Path, name: str) -> Any:
    if (path / name).exists() and not (path / name).is_file():
        raise _damaged(path, name, "it is not a file")  # but a folder, or a pipe that nobody writes to
    try:
        return json.loads((path / name).read_text(encoding="utf-8"), parse_constant=_no_constant)
    except FileNotFoundError:
        raise _damaged(path, name, "it is missing") from None
    except OSError as error:
        raise _damaged(path, name, str(error)) from error
    except (ValueError, RecursionError) as error:  # also bytes that are not UTF-8, as those of a pickle
        raise _damaged(path, name, f"it is not JSON ({error})") from error


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _read_json(path: Path, name: str, files: Mapping[str, Any]) -> Any:
    _check_digest(path, name, files)
    return _parsed(path, name)


def _joined(path: Path, name: str, files: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    value = _read_json(path, name, files)
    try:
        state = join(value, tensors)
    except (ArithmeticError, ValueError, TypeError, RecursionError) as error:
        raise _damaged(path, name, str(error)) from error
    if not isinstance(state, dict):
        raise _damaged(path, name, "it is not a table of states")
    return state


def _read_tensors(path: Path, name: str, files: Mapping[str, Any], mapped: bool) -> dict[str, torch.Tensor]:
    _check_digest(path, name, files)
    is_safe = name.endswith(".safetensors")
    if is_safe and importlib.util.find_spec("safetensors") is None:
        raise CheckpointError(
            f"{path / name} needs safetensors, which is not installed here",
            rule="checkpoint",
            why="the run that wrote it had safetensors.",
            fix="pip install safetensors.",
        )
    try:
        if is_safe:
            found: Any = importlib.import_module("safetensors.torch").load_file(path / name)
        else:
            found = torch.load(path / name, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # what a file that was made by hand makes torch and safetensors raise
        raise _damaged(path, name, "it holds something else than tensors") from error
    if not isinstance(found, dict) or not all(_is_plain(tensor) for tensor in found.values()):
        raise _damaged(path, name, "it holds something else than tensors")
    return dict(found)


def _is_plain(value: Any) -> bool:
    """True for a tensor as a save writes them: dense, of no other class, in host memory."""
    is_dense = type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu"
    return is_dense and not value.is_quantized


def _check_digest(path: Path, name: str, files: Mapping[str, Any]) -> None:
    if name not in files:
        raise _damaged(path, name, "the manifest does not list it")
    try:
        found = _digest(path / name)["sha256"]
    except OSError as error:
        raise _damaged(path, name, str(error)) from error
    if found != files[name].get("sha256"):
        raise _damaged(path, name, "its contents changed since it was saved (SHA-256)")


@contextlib.contextmanager
def applied(path: Path, what: str) -> Iterator[None]:
    """Refuse a state of another form than it was saved in: what follows finds out only where it uses it."""
    try:
        yield
    except StepgraphError:
        raise
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise CheckpointError(
            f"{what} in {path} cannot be used: {type(error).__name__}: {reason}",
            rule="checkpoint",
            why="it does not have the form in which a run saves it.",
            fix="load another checkpoint; a run that changes its model or optimizer starts anew.",
        ) from error


def _damaged(path: Path, name: str, what: str) -> CheckpointError:
    earlier = [other for _, other in checkpoints_in(path.parent) if other.name < path.name]
    fix = f"checkpoint.load={earlier[-1]} loads the one before it." if earlier else "restore the folder from a copy."
    return CheckpointError(
        f"{path}: the file {name} cannot be used: {what}",
        rule="checkpoint-damaged",
        why="a checkpoint is loaded whole, and only tensors and JSON are read from it: no code in a file is run.",
        fix=fix,
    )
