"""One download from the Hugging Face hub, in a process of its own (`rl_core/hub.py` starts it).

Run as a file, not as a module (`python -P hub_download.py REQUEST`): it needs nothing of Headway. huggingface_hub reads
HF_HUB_OFFLINE once, at its import, so only a fresh process can be online beside one that is not.
"""

from __future__ import annotations

import json
import sys
from typing import Any, cast


def download(request: dict[str, Any]) -> dict[str, str]:
    """`{"path": directory of the snapshot}`, or `{"error": type, "message": first line}` for what the hub refuses."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return {"path": cast(Any, huggingface_hub).snapshot_download(**request)}
    except (HfHubHTTPError, OSError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return {"error": type(error).__name__, "message": lines[0][:300] if lines else "no word of why"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(download(json.loads(sys.argv[1]))) + "\n")
