"""Which machine is simulated: a preset, this machine, or a file."""

from __future__ import annotations

import json
import tempfile
from importlib import resources
from pathlib import Path

from zipmoe.errors import InvalidArgumentError
from zipmoe.planning.device import DeviceProfile, host_fingerprint
from zipmoe.profiling.profile_store import REPORT_SUFFIX, profiles_folder

THIS_MACHINE = "this"


def preset_names() -> list[str]:
    """Machines whose constants come with ZipMoE, each number with its source (``devices/*.json``)."""
    folder = resources.files("zipmoe.simulation") / "devices"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def preset_sources(name: str) -> dict[str, str]:
    """Where each number of a preset comes from."""
    sources = _preset(name)["sources"]
    return {str(key): str(value) for key, value in sources.items()}


def this_machine_profile_path() -> Path | None:
    """The newest profile of this machine that ``zipmoe profile`` kept, of whatever disk and folder; None if none."""
    folder = profiles_folder()
    found = folder.glob(f"{host_fingerprint().digest}-*.json")
    profiles = [path for path in found if not path.name.endswith(REPORT_SUFFIX)]
    return max(profiles, key=lambda path: path.stat().st_mtime, default=None)


def load_device(name: str) -> DeviceProfile:
    """Constants of a machine.

    Args:
        name: a preset, ``this``, or the path of a device profile.

    Raises:
        InvalidArgumentError: there is no such preset or file, or no profile of this machine.
        DeviceProfileError: the file is not a device profile.
    """
    if name in preset_names():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(_preset(name)["profile"]), encoding="utf-8")
            return DeviceProfile.load(path)
    if name == THIS_MACHINE:
        own = this_machine_profile_path()
        if own is None:
            raise InvalidArgumentError(
                f"this machine has no device profile in {profiles_folder()}",
                hint="measure it with zipmoe profile, or choose --device " + ", ".join(preset_names()),
            )
        return DeviceProfile.load(own)
    if not Path(name).is_file():
        raise InvalidArgumentError(
            f"device {name!r} is neither a preset nor a file",
            hint=f"choose {', '.join(preset_names())}, {THIS_MACHINE}, or the path of a device profile",
        )
    return DeviceProfile.load(Path(name))


def _preset(name: str) -> dict[str, dict[str, object]]:
    text = (resources.files("zipmoe.simulation") / "devices" / f"{name}.json").read_text(encoding="utf-8")
    value: dict[str, dict[str, object]] = json.loads(text)
    return value
