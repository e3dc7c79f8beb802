"""
Brings the original files of a task to data/TASK: from their address, or from a folder where they are already.

A download goes to data/TASK/download; one that broke off goes on where it stopped. Every file gets its name when it is whole.
"""
import argparse, fcntl, hashlib, http.client, os, shutil, tarfile, time, urllib.error, urllib.request, zipfile
from pathlib import Path

from data.prepare import DATA, progress
from data.tasks import load_task

TIMEOUT = 60  # seconds without a byte after which a connection counts as stalled
TRIES = 5     # of a connection that breaks; each goes on at the byte where the one before it ended
WAIT = 2      # seconds before the second try, doubled for each further one


def fetch(url, path, check):
    """Downloads `url` to `path`. It grows in path.part, from what an earlier try left there, and gets its name when it is
    complete and `check(path.part)` finds no fault."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    for attempt in range(TRIES):
        have = part.stat().st_size if part.exists() else 0
        try:
            request = urllib.request.Request(url, headers={"Range": f"bytes={have}-", "User-Agent": "python"} if have else {"User-Agent": "python"})
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                if have and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                    have = 0  # the server sends all of it again
                if not (length := response.headers.get("Content-Length", "")).isdigit():
                    raise ConnectionError("the server does not say how long the file is")
                total = have + int(length)
                free = shutil.disk_usage(path.parent).free
                if total - have > free:
                    raise SystemExit(f"{path.parent}: {free / 1e9:.1f} GB free, {path.name} needs {(total - have) / 1e9:.1f} GB more; make room and start again")
                with open(part, "ab") as file, progress(total, path.name, initial=have) as bar:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        raise SystemExit(f"{part}: another process is fetching it; wait for that one, or stop it") from None
                    if file.tell() < have:
                        raise ConnectionError("another process took the file away")
                    file.truncate(have)
                    while block := response.read1(1 << 20):
                        try:
                            file.write(block)
                        except OSError as full:
                            raise SystemExit(f"{part}: {full.strerror}; make room and start again, what is complete is kept") from None
                        bar.update(len(block))
                if part.stat().st_size < total:
                    raise ConnectionError(f"ended after {part.stat().st_size:,} of {total:,} bytes")
            break
        except urllib.error.HTTPError as refused:
            if refused.code == 416 and refused.headers.get("Content-Range", "").endswith(f"/{have}"):
                break  # it was complete already
            if refused.code == 416:
                part.unlink()
            elif refused.code < 500 and refused.code != 429:
                raise SystemExit(f"{url}: HTTP error {refused.code} ({refused.reason}); check the name and the network, then start again") from None
            problem = f"HTTP error {refused.code} ({refused.reason})"
        except TimeoutError:
            problem = f"no byte for {TIMEOUT} seconds"
        except (OSError, http.client.HTTPException) as broken:
            problem = str(getattr(broken, "reason", broken)) or type(broken).__name__
        if attempt < TRIES - 1:
            time.sleep(WAIT * 2**attempt)
    else:
        raise SystemExit(f"{url}: {problem}, {TRIES} times; start again later, it goes on with what is in {part.name}")
    try:
        check(part)
    except SystemExit as fault:
        part.unlink()
        raise SystemExit(f"{fault} (from {url}; deleted, start again)") from None
    os.replace(part, path)


def checksum(md5):
    """A check for `fetch`; md5: what the file's publisher says, or None."""
    def check(path):
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found != md5:
            raise SystemExit(f"{path}: its checksum is {found}, not {md5}")
    return check if md5 else lambda path: None


def unpack(archive, names, folder):
    """Writes the members with these base names beside each other into folder."""
    wanted = lambda name: Path(name).name in names and "__MACOSX" not in name

    def keep(name, source):
        with source, open(folder / "unpacked.tmp", "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        os.replace(folder / "unpacked.tmp", folder / Path(name).name)

    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                for name in filter(wanted, packed.namelist()):
                    keep(name, packed.open(name))
        else:
            with tarfile.open(archive) as packed:
                for member in packed:
                    if member.isfile() and wanted(member.name):
                        keep(member.name, packed.extractfile(member))
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as problem:
        raise SystemExit(f"{archive}: cannot be unpacked ({problem}); delete it and start again") from None


def prepare(task, about, sources, files, convert=None, where=None):
    """sources: [(address, md5 or None)], files or archives. files: {name in data/TASK: names that the file has at its source}. convert(source, target)
    writes the file where it is not taken as it is. where: who gives the files, if they have no address."""
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="folder", metavar="DIR", type=Path, required=where is not None,
                        help="a folder that holds " + ", ".join(names[0] for names in files.values()) + (f" (from {where})" if where else ""))
    args, folder = parser.parse_args(), DATA / task
    if all((folder / name).exists() for name in files):
        raise SystemExit(f"{folder}: {', '.join(files)} are already there; delete them to make the task again")
    source = args.folder or folder / "download"
    if not args.folder:
        for url, md5 in sources:
            path = source / url.rsplit("/", 1)[1]
            if not path.exists():
                fetch(url, path, checksum(md5))
            if path.name.endswith((".zip", ".tar.gz")):
                unpack(path, {name for names in files.values() for name in names}, source)
    found = {target: next((source / name for name in names if (source / name).is_file()), None) for target, names in files.items()}
    for target, path in found.items():
        if path is None:
            raise SystemExit(f"{source}: no {' or '.join(files[target])} there")
    for target, path in found.items():
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        part = folder / f"{target}.tmp"
        (convert or shutil.copyfile)(path, part)
        os.replace(part, folder / target)
    if not (folder / "collection.tsv").exists() and not (folder / "corpus.jsonl").exists():  # those take a while to read
        ready = load_task(task)
        print("\n".join([f"{folder}: " + ", ".join(f"{split} {len(rows):,}" for split, rows in ready.rows.items()), *ready.notes]))
    print(f"next: python finetune.py --init_from out/mlm/last.pt --task {task}")
