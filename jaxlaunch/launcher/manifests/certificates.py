"""The certificates of one job's gang: an authority of its own, and one certificate that every host shows.

The authority's key is dropped once it has signed, so that nobody can have another certificate of this job, and no
other job's is accepted in it. One certificate serves all hosts: they read it from one Secret, and who has it is in.
"""

from __future__ import annotations

import datetime

from jaxlaunch.contract import AUTHORITY, CERTIFICATE, CERTIFICATE_KEY, PEER_URI

VALID = datetime.timedelta(days=3650)  # longer than any job: nothing could sign a newer one
SKEW = datetime.timedelta(days=1)  # by which a node's clock may be behind


def made(job: str) -> dict[str, bytes]:
    """Certificate, key and authority of a new gang, in PEM, by the names that Kubernetes gives such files."""
    from cryptography import x509  # here, since only who submits needs it: it takes a tenth of a second to import
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "jaxlaunch gang authority")])

    def signed(subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType) -> bytes:
        builder = (
            x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - SKEW)
            .not_valid_after(now + VALID)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, job[:64])])
    return {
        AUTHORITY: signed(issuer, authority, x509.BasicConstraints(ca=True, path_length=0)),
        CERTIFICATE: signed(
            subject,
            own,
            x509.BasicConstraints(ca=False, path_length=None),
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{PEER_URI}{job}")]),
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()),
        ),
        CERTIFICATE_KEY: own.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    }
