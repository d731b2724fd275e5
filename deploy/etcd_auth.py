"""Makes etcd require passwords: a user `root`, and a user `tandem` with rights to the keys below /tandem/ and nothing else.

Usage: etcd_auth.py URL ROOT_PASSWORD_FILE PASSWORD_FILE. A further run sets the password of `tandem` again, but not the password of `root`.
"""

import base64
import json
import sys
import time
import urllib.error
import urllib.request

PATIENCE_SECONDS = 60


def text_of(path):
    with open(path, encoding="ascii") as file:
        return file.read().strip()


def ask(url, method, body, token=None):
    """Returns the reply of etcd's JSON gateway, or None if the item to create exists already."""
    headers = {"authorization": token} if token else {}
    request = urllib.request.Request(f"{url}/v3/{method}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")
        if "already" in said:
            return None
        raise RuntimeError(f"etcd refuses {method}: {said}") from error


def in_base64(key):
    return base64.b64encode(key.encode()).decode()


def sign_in(url, password):
    """Returns a token for root, or None while etcd requires no passwords. Waits for an etcd that has just started."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return ask(url, "auth/authenticate", {"name": "root", "password": password})["token"]
        except RuntimeError as error:
            if "authentication is not enabled" in str(error):
                return None
            raise
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"etcd at {url} does not answer: {error}")
            time.sleep(0.5)


def main(url, root_file, user_file):
    root, user = text_of(root_file), text_of(user_file)
    token = sign_in(url, root)
    if ask(url, "auth/user/add", {"name": "tandem", "password": user}, token) is None:
        ask(url, "auth/user/changepw", {"name": "tandem", "password": user}, token)
    ask(url, "auth/role/add", {"name": "tandem"}, token)
    # The range has all keys that begin with `/tandem/`. It ends before `/tandem0`, because `0` is the character after `/`.
    keys = {"permType": "READWRITE", "key": in_base64("/tandem/"), "range_end": in_base64("/tandem0")}
    ask(url, "auth/role/grant", {"name": "tandem", "perm": keys}, token)
    ask(url, "auth/user/grant", {"user": "tandem", "role": "tandem"}, token)
    if token is None:
        ask(url, "auth/user/add", {"name": "root", "password": root})
        ask(url, "auth/role/add", {"name": "root"})
        ask(url, "auth/user/grant", {"user": "root", "role": "root"})
        ask(url, "auth/enable", {})
    print(f"etcd at {url} requires passwords")


if __name__ == "__main__":
    main(*sys.argv[1:])
