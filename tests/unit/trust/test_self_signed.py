"""A gateway's own certificate: the same until it lacks a name or ends, and a proof of one endpoint alone."""

from __future__ import annotations

import os
import stat
from datetime import timedelta

import pytest
from cryptography import x509

from hpc_serve.trust import making
from hpc_serve.trust.certificates import ensure_self_signed

NAMES, ADDRESSES = ("login1", "login1.cluster"), ("127.0.0.1", "10.0.0.1")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "login1.pem"


@pytest.fixture
def made(path):
    """Returns the certificate for names and addresses."""
    return lambda names=NAMES, addresses=ADDRESSES: ensure_self_signed(path, names=names, addresses=addresses)


def test_it_stays_the_same_while_it_holds_what_is_asked_for(made, path):
    first = made()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert made(names=NAMES[:1], addresses=ADDRESSES[:1]) == first
    assert made(names=(*NAMES, "login1.other")) != first
    assert made(addresses=(*ADDRESSES, "10.0.0.2")) != first


def test_it_is_made_anew_before_it_ends(made, monkeypatch):
    first, now = made(), making.now()
    monkeypatch.setattr(making, "now", lambda: now + making.RUN_LIFETIME - timedelta(days=91))
    assert made() == first
    monkeypatch.setattr(making, "now", lambda: now + making.RUN_LIFETIME - timedelta(days=89))
    assert made() != first


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_damaged_one_is_made_anew(made, path, text):
    path.write_text(text)
    os.chmod(path, 0o600)
    assert "BEGIN CERTIFICATE" in made()


def test_one_whose_key_others_could_read_is_made_anew(made, path):
    first = made()
    os.chmod(path, 0o644)
    assert made() != first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_it_signs_for_nobody_else(made):
    certificate = x509.load_pem_x509_certificate(made().encode())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert certificate.issuer == certificate.subject
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
