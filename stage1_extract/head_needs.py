"""What of the store's head a run still has to write."""

from stage1_extract.config import ExtractRun
from storage.head import LAST_LAYERS_FILE
from storage.writer import WritableStore


def lacking_head_files(store: WritableStore, run: ExtractRun) -> list[str]:
    """Gives names of files that the run wants in the store's head and that are not there."""
    return store.lacking_head_files(also=[LAST_LAYERS_FILE] if run.store.last_layers else [])
