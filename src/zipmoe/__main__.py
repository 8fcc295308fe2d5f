"""``python -m zipmoe``."""

from zipmoe.cli.main import console_script

console_script()
