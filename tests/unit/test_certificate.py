"""The name that a certificate is for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cluster.certificate import name_in


def a_certificate(folder: Path, *extra: str, subject: str = "/CN=common") -> Path:
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", subject, *extra,
        ],
        cwd=folder, check=True, capture_output=True, timeout=30,
    )  # fmt: skip
    return folder / "cert.pem"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("DNS:b.example.com,DNS:a.example.com", "b.example.com"),
        ("IP:10.1.2.3", "10.1.2.3"),
        ("DNS:*.example.com", "any.example.com"),
    ],
)
def test_first_alternative_name_counts(tmp_path: Path, names: str, expected: str) -> None:
    assert name_in(a_certificate(tmp_path, "-addext", f"subjectAltName={names}")) == expected


def test_common_name_counts_where_there_is_no_other(tmp_path: Path) -> None:
    assert name_in(a_certificate(tmp_path)) == "common"


def test_certificate_without_any_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names no host"):
        name_in(a_certificate(tmp_path, subject="/O=nobody"))


def test_file_without_a_certificate_is_refused(tmp_path: Path) -> None:
    (tmp_path / "not.pem").write_text("nothing")
    with pytest.raises(ValueError, match=r"not\.pem holds no PEM certificate"):
        name_in(tmp_path / "not.pem")
