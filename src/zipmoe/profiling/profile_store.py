"""Where profiles are kept, and whether a kept one may be used here and now.

Two files lie side by side: the device profile that the planner reads, and the report with everything that was measured
and what it belongs to. They are kept per machine, disk and packed folder, in the user's cache and never in the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from zipmoe.engine.cpu_affinity import describe_cpus
from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.device import DEFAULT_MAXIMUM_AGE, DeviceProfile, DeviceProfileError, HostFingerprint
from zipmoe.profiling.device_constants import device_profile
from zipmoe.profiling.disk_identity import DiskIdentity
from zipmoe.profiling.report import REPORT_VERSION, VERSION_KEY, ProfileReport, Provenance
from zipmoe.store.durable_files import clear_write_errors, write_json_together
from zipmoe.store.packed_folder import PackedFolder

REPORT_SUFFIX = ".report.json"
_OUTPUT_HINT = "name a file in an existing folder outside the packed one, with --output"


def profiles_folder() -> Path:
    """``$XDG_CACHE_HOME/zipmoe/profiles``, by default below ``~/.cache``; it need not exist."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The specification says to ignore relative paths.
    base = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    return base / "zipmoe" / "profiles"


def profile_path(origin: Provenance) -> Path:
    """Where the profile of this machine, disk and folder is kept."""
    pack = hashlib.sha256(origin.pack_identity.encode()).hexdigest()[:8]
    return profiles_folder() / f"{origin.host.digest}-{origin.disk.digest}-{pack}.json"


def report_path(profile: Path) -> Path:
    """The report beside a profile."""
    return profile.with_name(profile.name.removesuffix(".json") + REPORT_SUFFIX)


def check_destination(path: Path, folder: Path) -> None:
    """Refuse a place for the profile before anything is measured.

    Raises:
        InvalidArgumentError: it lies in the packed folder, is a folder, or cannot be written.
    """
    if path.resolve().is_relative_to(folder.resolve()):
        raise InvalidArgumentError(
            f"{str(path)!r} lies in the packed folder, into which nothing is written", hint=_OUTPUT_HINT
        )
    if path.is_dir():
        raise InvalidArgumentError(f"{str(path)!r} is a folder", hint=_OUTPUT_HINT)
    parent = next((above for above in path.absolute().parents if above.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise InvalidArgumentError(
            f"{str(path)!r} cannot be written: {str(parent)!r}: {error.strerror}", hint=_OUTPUT_HINT
        ) from error


def save_profile(report: ProfileReport, path: Path) -> DeviceProfile:
    """Derive the profile, and write report and profile; both are complete, or what was there before stays.

    Raises:
        InvalidArgumentError: too much was left out for lack of time.
        NotEnoughDiskError: the disk is full.
    """
    profile = device_profile(report)
    with clear_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_together({report_path(path): report.to_json(), path: profile.to_json()})
    return profile


@dataclass(frozen=True)
class KeptProfile:
    """A profile that was found, and what is wrong with it."""

    path: Path
    profile: DeviceProfile | None
    """None if the file is unreadable."""
    doubts: tuple[str, ...]
    """Reasons not to use it, as clauses; none if it is good."""


def load_profile(path: Path, here: Provenance, *, maximum_age: timedelta = DEFAULT_MAXIMUM_AGE) -> KeptProfile:
    """Read a profile and compare what it belongs to with ``here``.

    Raises:
        DeviceProfileError: the profile is unreadable, damaged or of another version.
    """
    profile = DeviceProfile.load(path)
    doubts = profile.doubts(now=here.measured_at, host=here.host, maximum_age=maximum_age)
    try:
        origin = read_provenance(report_path(path))
    except DeviceProfileError as error:
        doubts.append(f"what it belongs to is unknown ({error})")
        return KeptProfile(path, profile, tuple(doubts))
    if origin.measured_at != profile.measured_at:
        doubts.append(f"{report_path(path).name} belongs to another measurement")
    return KeptProfile(path, profile, tuple(doubts + differences(origin, here)))


def differences(origin: Provenance, here: Provenance) -> list[str]:
    """What changed since the measurement, apart from time and machine (which the profile itself knows), as clauses."""
    changed = []
    if origin.disk != here.disk:
        changed.append(
            f"it was measured on the disk {origin.disk.describe()}, but the folder is on {here.disk.describe()}"
        )
    if origin.pack_identity != here.pack_identity:
        changed.append("it was measured with another packed folder")
    if origin.zipmoe_version != here.zipmoe_version:
        changed.append(f"it was measured by ZipMoE {origin.zipmoe_version}, but this is {here.zipmoe_version}")
    for codec in sorted(origin.libraries.keys() | here.libraries.keys()):
        then, now = origin.libraries.get(codec, "no library"), here.libraries.get(codec, "no library")
        if then != now:
            changed.append(f"it was measured with {then} for {codec}, but this build has {now}")
    if origin.instruction_set != here.instruction_set:
        changed.append(
            f"it was measured with {origin.instruction_set} kernels, but now {here.instruction_set} ones run"
        )
    if origin.torch_version != here.torch_version:
        changed.append(f"it was measured with torch {origin.torch_version}, but this is {here.torch_version}")
    return changed


def read_provenance(path: Path) -> Provenance:
    """What the numbers of a report belong to.

    Raises:
        DeviceProfileError: unreadable, damaged or of another version.
    """
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if value[VERSION_KEY] != REPORT_VERSION:
            raise ValueError(f"its version is {value[VERSION_KEY]!r}, not {REPORT_VERSION}")
        origin = dict(value["provenance"])
        origin["host"] = HostFingerprint(**origin["host"])
        origin["disk"] = DiskIdentity(**origin["disk"])
        origin["measured_at"] = datetime.fromisoformat(origin["measured_at"])
        found = Provenance(**origin)
        asdict(found)
        return found
    except FileNotFoundError:
        raise DeviceProfileError(f"{path.name} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeviceProfileError(f"{path.name} is not readable: {error}") from error


def look_up_profile(
    folder: PackedFolder, *, here: Provenance | None = None, maximum_age: timedelta = DEFAULT_MAXIMUM_AGE
) -> KeptProfile | None:
    """The kept profile of this folder, good or not; None if it was never measured.

    Without one of this machine and disk, one of the same folder from elsewhere (a shared or copied home directory, a
    changed machine) is returned with its doubts. Files that are no profiles are doubts, too, not errors.
    """
    if here is None:
        from zipmoe.profiling.measure import provenance

        here = provenance(folder)
    exact = profile_path(here)
    pack = exact.name.rsplit("-", 1)[-1]
    elsewhere = sorted(path for path in profiles_folder().glob(f"*-{pack}") if path != exact)
    for path in [exact, *reversed(elsewhere)]:
        if not path.is_file():
            continue
        try:
            return load_profile(path, here, maximum_age=maximum_age)
        except DeviceProfileError as error:
            return KeptProfile(path, None, (str(error),))
    return None


def _to_standard_error(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def find_profile(
    folder: PackedFolder,
    *,
    here: Provenance | None = None,
    report: Callable[[str], None] = _to_standard_error,
    maximum_age: timedelta = DEFAULT_MAXIMUM_AGE,
) -> DeviceProfile | None:
    """The profile to plan this folder with; None if there is none that belongs here and is fresh.

    Why a kept profile is not used is said to ``report``, in one line with what to do about it. That nothing was ever
    measured is not said: callers know best what that means for them.
    """
    kept = look_up_profile(folder, here=here, maximum_age=maximum_age)
    if kept is None:
        return None
    if kept.doubts:
        report(refusal(kept, folder.path))
        return None
    return kept.profile


def refusal(kept: KeptProfile, folder: Path, cpus: Collection[int] | None = None) -> str:
    """One line: which profile is not used, why, and what to do; ``cpus``: see ``profile_command``."""
    reasons, command = "; ".join(kept.doubts), profile_command(folder, cpus)
    return f"note: the kept profile {str(kept.path)!r} is not used: {reasons}; measure again: {command}"


def profile_command(folder: Path, cpus: Collection[int] | None = None) -> str:
    """The command that measures for a folder.

    Args:
        folder: the packed model.
        cpus: that a run is kept on; measurements are of a machine with as many cores as they may use. None: all.
    """
    command = f"zipmoe profile {folder}"
    return command if cpus is None else f"taskset -c {describe_cpus(cpus)} {command}"
