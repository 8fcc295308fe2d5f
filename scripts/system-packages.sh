#!/usr/bin/env bash
# Install what the build needs from Debian or Ubuntu, if it is missing and we may; say what is missing otherwise.
# PYTHON is the interpreter that the virtual environment will be made with (default: python3).
set -euo pipefail

python=${PYTHON:-python3}
needed=()
useful=()
have_header() { echo "#include <$1>" | c++ -E -x c++ - >/dev/null 2>&1; }

command -v c++ >/dev/null || needed+=(g++)
command -v cmake >/dev/null || needed+=(cmake)
command -v ninja >/dev/null || needed+=(ninja-build)
if command -v c++ >/dev/null; then
  have_header zstd.h || needed+=(libzstd-dev)
  have_header lz4hc.h || needed+=(liblz4-dev)
  have_header xxhash.h || needed+=(libxxhash-dev)
  have_header liburing.h || useful+=(liburing-dev)
else
  needed+=(libzstd-dev liblz4-dev libxxhash-dev)
  useful+=(liburing-dev)
fi
if command -v "$python" >/dev/null && ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "error: Python 3.11 or newer is needed, $python is $("$python" --version)" >&2
  echo "hint: make demo PYTHON=python3.12, or whatever the newer one is called" >&2
  exit 1
fi
"$python" -c 'import ensurepip' 2>/dev/null || needed+=(python3-venv)
"$python" - 2>/dev/null <<'PYTHON' || needed+=(python3-dev)
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists())
PYTHON

[ ${#needed[@]} -eq 0 ] && [ ${#useful[@]} -eq 0 ] && exit 0
if command -v apt-get >/dev/null && { [ "$(id -u)" -eq 0 ] || sudo -n true 2>/dev/null; }; then
  sudo=$([ "$(id -u)" -eq 0 ] || echo sudo)
  echo "installing Debian packages: ${needed[*]} ${useful[*]}" >&2
  $sudo apt-get update -qq
  # env, because sudo drops variables of the caller
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${needed[@]}" "${useful[@]}" >/dev/null
elif [ ${#needed[@]} -eq 0 ]; then
  echo "note: without ${useful[*]} everything works but --io-backend uring" >&2
else
  echo "error: these Debian packages are missing and only root may install them: ${needed[*]}" >&2
  echo "hint: sudo apt-get install ${needed[*]}" >&2
  exit 1
fi
