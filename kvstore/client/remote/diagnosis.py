"""Why there is no way to a server that is there: gRPC says of most failures of TLS only that the connection broke."""

from __future__ import annotations

import socket
import ssl
import time

from kvstore.client.remote.target import PLAIN, TLS, UNIX, Target
from kvstore.config.addresses import split_tcp
from kvstore.wire.tls import load_pair

_OF_ANOTHER_HOST = (62, 64)
"""OpenSSL's verify codes for a name and for an address that the certificate does not have."""
_NOT_NOW = (9, 10)
"""Those for a certificate that is not valid yet, and for one that has expired."""
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")


def tls_trouble(target: Target, told: str, deadline_s: float) -> str:
    """What is wrong with the TLS between this client and the server, and the way out; "" if it is something else.

    ``told`` is what gRPC says. Connects once more, and blocks until ``deadline_s`` (monotonic) at most.
    """
    if target.address.startswith(UNIX):
        return ""
    if "create security handshaker" in told:
        return (
            "TLS can't begin with what was given: root_certificates must be certificates, and client_certificate a "
            "certificate and the key that belongs to it, all of them PEM"
        )
    try:
        trouble = _tried(target, deadline_s)
    except OSError:
        trouble = ""
    if not trouble and "CERTIFICATE_VERIFY_FAILED" in told:
        return _untrusted("certificate verify failed")
    return trouble


def _tried(target: Target, deadline_s: float) -> str:
    """``tls_trouble`` as a handshake of our own finds it. Raises OSError where that finds nothing."""
    host, port = split_tcp(target.place, "the gRPC address")
    with socket.create_connection((host, port), _left_s(deadline_s)) as sock:
        sock.settimeout(_left_s(deadline_s))
        try:
            with _context(target).wrap_socket(sock, server_hostname=host) as secure:
                if target.plain:
                    return _use_tls(target)
                secure.settimeout(_left_s(deadline_s))
                # The server speaks first. That it wants another certificate it says after the handshake only.
                return "" if secure.recv(1) else _closed(target)
        except ssl.SSLCertVerificationError as error:
            if error.verify_code in _OF_ANOTHER_HOST:
                return (
                    f"the server's certificate is for another host ({error.verify_message}): use a name that "
                    "it has, or give the server one with this name"
                )
            if error.verify_code in _NOT_NOW:
                return f"the server's {error.verify_message}: have it renewed, or set this machine's clock"
            return _untrusted(error.verify_message)
        except (ssl.SSLEOFError, ConnectionResetError):
            return "" if target.plain else _closed(target)
        except ssl.SSLError as error:
            return _refused(target, error.reason or str(error))


def _refused(target: Target, reason: str) -> str:
    certificate = "CERTIFICATE" in reason or "UNKNOWN_CA" in reason
    if target.plain:
        return _use_tls(target) if certificate or "ALERT" in reason else ""
    if reason in _NOT_TLS:
        return f"the server does not speak TLS on this port: give another port (or {PLAIN} for a proxy on this machine)"
    if certificate and target.client_certificate is None:
        return "the server wants a certificate of its clients: give client_certificate=(certificate, key)"
    if certificate:
        return f"the server does not take client_certificate ({reason}): give one of an authority that it trusts"
    return f"the TLS handshake failed ({reason})"


def _context(target: Target) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    if target.plain:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elif target.root_certificates is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(cadata=target.root_certificates.decode("ascii", "replace"))
    if target.client_certificate is not None:
        load_pair(context, *target.client_certificate)
    return context


def _use_tls(target: Target) -> str:
    return f"the server speaks TLS on this port: use {TLS}{target.place}"


def _untrusted(why: str) -> str:
    return (
        f"the server's certificate is not trusted ({why}): give root_certificates=, the PEM file of the authority "
        "that signed it"
    )


def _closed(target: Target) -> str:
    if target.client_certificate is not None:
        return "the server closed the connection right after the TLS handshake"
    return (
        "the server closed the connection right after the TLS handshake, most likely as it wants a certificate of "
        "its clients: give client_certificate=(certificate, key)"
    )


def _left_s(deadline_s: float) -> float:
    return max(deadline_s - time.monotonic(), 0.001)
