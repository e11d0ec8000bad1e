#!/usr/bin/env bash
# Checks the AllReduce overlap on a GPU. Usage: tests/lab/device_overlap.sh FOLDER [options of device_overlap.py]
# PYTHON (python3): one that has torch.
set -euo pipefail
folder=$(realpath -m "${1:?usage: $0 FOLDER}")
cd "$(dirname "$0")/../.."
exec env PYTHONPATH=. PYTHONUNBUFFERED=1 "${PYTHON:-python3}" -m tests.lab.device_overlap "$folder" "${@:2}"
