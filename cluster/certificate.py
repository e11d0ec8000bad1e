"""What a certificate says of its owner."""

from __future__ import annotations

from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import NameOID


def name_in(path: Path) -> str:
    """The first name or address that the first certificate of a PEM file is valid for.

    Raises:
        OSError: it cannot be read. ValueError: no certificate is in it, or it names nothing.
    """
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} holds no PEM certificate: {error}") from None
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    found = [
        *names.get_values_for_type(x509.DNSName),
        *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
        *(str(name.value) for name in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)),
    ]
    if not found:
        raise ValueError(f"the certificate in {path} names no host")
    return found[0].replace("*.", "any.", 1) if found[0].startswith("*.") else found[0]
