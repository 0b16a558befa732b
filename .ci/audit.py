"""Look for known vulnerabilities of pinned packages with pip-audit: python .ci/audit.py LOCK

Succeeds with one line where the database cannot be reached. To accept a vulnerability, add its id to ACCEPTED with the
reason.
"""

import json
import subprocess
import sys

ACCEPTED: tuple[str, ...] = ()


def main(lock: str) -> int:
    options = ["--require-hashes", "--disable-pip", "--progress-spinner=off", "--timeout=10", "--format=json"]
    options += [f"--ignore-vuln={name}" for name in ACCEPTED]
    result = subprocess.run(
        [sys.executable, "-m", "pip_audit", "--requirement", lock, *options],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        packages = json.loads(result.stdout)["dependencies"]
    except ValueError:  # no output: the connection failed
        packages = []
    audited = [package for package in packages if "skip_reason" not in package]
    if not audited:
        print("audit: the database of vulnerabilities cannot be reached; nothing was checked.")
        return 0
    vulnerable = [(package, found) for package in audited for found in package["vulns"]]
    for package, found in vulnerable:
        fixed = ", ".join(found["fix_versions"]) or "no version"
        print(f"audit: {package['name']} {package['version']}: {found['id']}, fixed in {fixed}")
    print(f"audit: {len(audited)} packages, {len(vulnerable)} known vulnerabilities.")
    return 1 if vulnerable else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
