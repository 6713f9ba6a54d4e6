#!/bin/sh
# Build the wheel, install it in a new environment outside the clone, and run the main job there.
set -eu
root=$(pwd)
python=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$python" -m build --quiet --wheel --outdir "$place/dist" "$root"
"$python" -m venv "$place/bare"
"$place/bare/bin/pip" install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$place"/dist/*.whl
cd "$place"
"$place/bare/bin/fedtail" demo --rounds 5 --json > demo.json
"$place/bare/bin/python" - <<'PY'
import json
rows = json.load(open("demo.json"))["rows"]
assert [r["tail_fraction"] for r in rows] == [None, 0.5, 0.25], rows
assert all(0 <= r[k] <= 100 for r in rows for k in ("mean", "p90", "worst10")), rows
PY
echo "the wheel runs the demo in a bare environment"
