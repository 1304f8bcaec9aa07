#!/usr/bin/env bash
# Make .venv-sb3 and .venv-rllib in the repository root, each with its own pins. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

for peer in sb3 rllib; do
    venv=.venv-$peer
    pins=bench/peers/$peer.txt
    if [ -f "$venv/pins.txt" ] && cmp -s "$pins" "$venv/pins.txt"; then
        echo "$venv: up to date"
        continue
    fi
    echo "$venv: installing $pins"
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    # torch first: an unpinned torch asked for by a peer would pull its CUDA packages
    "$venv/bin/pip" install --quiet --disable-pip-version-check -c bench/peers/constraints.txt torch
    "$venv/bin/pip" install --quiet --disable-pip-version-check -c bench/peers/constraints.txt -r "$pins"
    cp "$pins" "$venv/pins.txt"
done
