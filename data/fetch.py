"""
Brings the original files of a task to data/TASK: from their address, or from a folder where they are already.

A download goes to data/TASK/download; one that broke off goes on where it stopped. Every file gets its name when it is whole.
"""
import argparse, hashlib, http.client, os, shutil, tarfile, urllib.error, urllib.request, zipfile
from pathlib import Path

from data.prepare import DATA, progress
from data.tasks import load_task


def fetch(url, path, md5=None):
    """Downloads to path, unless it is there; md5: what its publisher says it is."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    elsewhere = "fetch it elsewhere and give its folder: --from DIR"
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "Mozilla/5.0", **({"Range": f"bytes={have}-"} if have else {})})
        try:
            answer = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as problem:
            if problem.code != 416:  # nothing is left to fetch
                raise
            answer = None
        if answer:
            with answer:
                have = have if answer.status == 206 else 0  # a server that knows no ranges begins anew
                total = have + int(answer.headers.get("Content-Length") or 0)
                with open(part, "ab" if have else "wb") as file, progress(total, path.name, initial=have) as bar:
                    while block := answer.read(1 << 20):
                        file.write(block)
                        bar.update(len(block))
            if part.stat().st_size < total:
                raise SystemExit(f"{url}: broke off at {part.stat().st_size:,} of {total:,} bytes; the same command goes on from there")
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as problem:
        raise SystemExit(f"{url}: {getattr(problem, 'reason', problem)}; try again, or {elsewhere}") from None
    if md5:
        digest = hashlib.md5()
        with open(part, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != md5:
            part.unlink()
            raise SystemExit(f"{url}: its checksum is {digest.hexdigest()}, not {md5}, so it was removed; try again, or {elsewhere}")
    os.replace(part, path)


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
            fetch(url, path, md5)
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
