"""What makes Transformers without ZipMoE refuse a packed folder: a setting that it does not know, and a tensor.

Without the plug-in, Transformers skips an unknown quantisation method with a warning and would go on with randomly
initialised experts. The packer therefore names an experts implementation that only the plug-in registers, and writes
one tensor of a wrong shape (U8, [1]) under the name of a real expert parameter: loading then fails with a size
mismatch. The plug-in removes that parameter from the module tree and ignores the key.
"""

from __future__ import annotations

from zipmoe.store.manifest import Manifest

EXPERTS_IMPLEMENTATION = "zipmoe"
"""Value of ``experts_implementation`` in the config.json of a packed folder: Transformers without ZipMoE refuses it. It
stands for the family's default combine order."""
GUARD_SHAPE = (1,)
"""Shape of the guard tensor; its dtype is U8. No expert parameter has one dimension."""


def guard_tensor_name(manifest: Manifest) -> str:
    """Name of the guard tensor: the first parameter of the first group's expert 0, as the module tree spells it."""
    group = manifest.expert_groups[0]
    return f"{group.path}.{group.parameters[0].format(expert=0)}"
