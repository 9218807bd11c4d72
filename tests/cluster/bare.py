"""An API server with only Kubernetes' own kinds, for the duration of a test."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from cluster import kubectl, wait_until
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

PROGRAMS = ("etcd", "kube-apiserver")


def available() -> bool:
    return all(shutil.which(program) for program in PROGRAMS)


@contextmanager
def api_server(folder: Path) -> Iterator[Path]:
    """Start an API server that stores everything in `folder`, and yield its kubeconfig."""
    client, peer, secure = (free_port() for _ in range(3))
    store, others = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    write_key(folder / "key.pem")
    (folder / "tokens.csv").write_text("token,admin,admin,system:masters\n")
    etcd = {
        "data-dir": folder / "etcd",
        "listen-client-urls": store,
        "advertise-client-urls": store,
        "listen-peer-urls": others,
        "initial-advertise-peer-urls": others,
        "initial-cluster": f"default={others}",
    }
    server = {
        "etcd-servers": store,
        "bind-address": "127.0.0.1",
        "secure-port": secure,
        "cert-dir": folder / "certs",
        "token-auth-file": folder / "tokens.csv",
        "authorization-mode": "RBAC",
        "service-cluster-ip-range": "10.0.0.0/24",
        "service-account-issuer": "https://kubernetes.default",
        "service-account-key-file": folder / "key.pem",
        "service-account-signing-key-file": folder / "key.pem",
    }
    file = write_kubeconfig(folder / "kubeconfig", secure)
    ready = ("--kubeconfig", str(file), "get", "--raw", "/readyz")
    with running("etcd", etcd, folder), running("kube-apiserver", server, folder):
        log = folder / "kube-apiserver.log"
        wait_until(lambda: kubectl(*ready), lambda: log.read_text()[-2000:], 120)
        yield file


@contextmanager
def running(program: str, settings: dict[str, object], folder: Path) -> Iterator[None]:
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    with (folder / f"{program}.log").open("w") as log:
        process = subprocess.Popen([program, *arguments], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def write_key(file: Path) -> None:
    """Write the key that signs the tokens of ServiceAccounts."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    plain = serialization.NoEncryption()
    form = serialization.PrivateFormat.TraditionalOpenSSL
    file.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))


def write_kubeconfig(file: Path, port: int) -> Path:
    server = {"server": f"https://127.0.0.1:{port}", "insecure-skip-tls-verify": True}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bare",
        "clusters": [{"name": "bare", "cluster": server}],
        "users": [{"name": "admin", "user": {"token": "token"}}],
        "contexts": [{"name": "bare", "context": {"cluster": "bare", "user": "admin"}}],
    }
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
