"""Model folders and adapters of named arrays."""

from convert.adapters import open_adapter
from convert.checkpoint import CONFIG, WEIGHT_FILES, write_config, write_shards
from convert.files import atomic_folder


def write_checkpoint(folder, tensors, config, **options):
    """Write (name, array) pairs and a config as a conversion does, whole or not at all."""
    with atomic_folder(folder, replaces=WEIGHT_FILES) as temporary:
        write_shards(temporary, ({name: array} for name, array in tensors), **options)
        write_config(temporary / CONFIG, config)


def read_adapter(folder, **options):
    """The settings of a PEFT folder and its arrays by path."""
    adapter = open_adapter(folder, **options)
    return adapter.config, {path: adapter.read(path) for path in adapter.tensors}
