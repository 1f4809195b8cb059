"""Tar files of every layout, whole and damaged, on disk and behind an address."""

import gzip
import io
import json
import multiprocessing
import os
import pickle
import tarfile
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from tests.data.pictures import contents, encoded, labeled, photo, same, write_tar
from vitrail.data import tars
from vitrail.data.dataset import Source
from vitrail.data.shards import open_shards
from vitrail.errors import FailureError, VitrailError


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    tars.files.clear()
    return tmp_path / "cache" / "shards"


def failure(pattern) -> str:
    with pytest.raises(VitrailError) as caught:
        open_shards(str(pattern))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def train(pattern) -> dict[str, str]:
    return contents(open_shards(str(pattern)).part("train"))


# Layouts


def test_a_sample_is_a_picture_and_the_number_of_its_class(tmp_path):
    data = open_shards(str(write_tar(tmp_path / "photos.tar", labeled(5))))
    assert data.name == "photos"
    assert contents(data.train) == {f"00{i}.png": str(i % 2) for i in range(5)}
    assert all(same(data.train.image(i), photo(i)) for i in range(5))


def test_a_label_may_be_a_name_or_a_line_of_json(tmp_path):
    body = encoded()
    told = {
        "a.png": body, "a.cls": "cat\n",
        "b.JPG": encoded(1, "jpg"), "b.json": json.dumps({"label": "dog", "width": 3}),
        "c.png": body, "c.json": '{"cls": "cat"}',
        "d.png": body, "d.json": '"dog"',
        "deep/e.png": body, "deep/e.cls": "bird", "deep/e.json": '{"label": "cat"}',
    }  # fmt: skip
    assert train(write_tar(tmp_path / "x.tar", told)) == {
        "a.png": "cat",
        "b.JPG": "dog",
        "c.png": "cat",
        "d.png": "dog",
        "deep/e.png": "bird",
    }


def test_numbers_are_classes_in_the_order_of_numbers(tmp_path):
    files = {}
    for number in (10, 9, 0, 2):
        files |= {f"{number}.png": encoded(), f"{number}.cls": str(number)}
    data = open_shards(str(write_tar(tmp_path / "x.tar", files)))
    assert data.labels == tuple(map(str, range(11)))
    assert data.train.targets.tolist() == [10, 9, 0, 2]


@pytest.mark.parametrize("name", ["classes.txt", "labels.txt"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_list_names_the_numbers(tmp_path, name, inside):
    lines = "Katze\nHund\nVogel\n"
    write_tar(tmp_path / "x.tar", labeled(4) | ({name: lines} if inside else {}))
    if not inside:
        (tmp_path / name).write_text(lines)
    data = open_shards(str(tmp_path / "x.tar"))
    assert data.labels == ("Katze", "Hund", "Vogel")
    assert data.train.targets.tolist() == [0, 1, 0, 1]


def test_a_list_that_is_too_short_is_refused(tmp_path):
    write_tar(tmp_path / "x.tar", labeled(4, classes=3))
    (tmp_path / "classes.txt").write_text("Katze\nHund")
    assert "has 2 lines, but there is a label 2" in failure(tmp_path / "x.tar")


def test_only_one_picture_belongs_to_a_label(tmp_path):
    files = labeled(2) | {"000.mask.png": encoded(9), "001.txt": "a caption"}
    assert train(write_tar(tmp_path / "x.tar", files)) == {"000.png": "0", "001.png": "1"}


def test_without_labels_the_folder_is_the_class(tmp_path):
    files = {f"set/{label}/{i}.1.jpg": encoded(i, "jpg") for label in ("b", "a") for i in range(2)}
    write_tar(tmp_path / "x.tar", {"set/LICENSE.txt": "free", "set/a/._0.jpg": "x"} | files)
    assert train(tmp_path / "x.tar") == {
        "b/0.1.jpg": "b",
        "b/1.1.jpg": "b",
        "a/0.1.jpg": "a",
        "a/1.1.jpg": "a",
    }


def test_parts_inside_the_tar_are_parts(tmp_path):
    files = {
        f"set/{part}/{label}/{i}.png": encoded(i)
        for part, n in {"train": 3, "validation": 1, "Test": 2}.items()
        for label in ("a", "train")
        for i in range(n)
    }
    data = open_shards(str(write_tar(tmp_path / "x.tar", files)))
    assert {name: len(part.targets) for name, part in data.parts.items()} == {
        "train": 6,
        "val": 2,
        "test": 4,
    }
    assert data.labels == ("a", "train")
    assert data.val.names == ["a/0.png", "train/0.png"]


@pytest.mark.parametrize("layout", ["photos-{}-0.tar", "{}/0.tar"])
def test_parts_in_the_names_of_shards_are_parts(tmp_path, layout):
    for start, part in enumerate(("train", "val", "test")):
        write_tar(tmp_path / "set" / layout.format(part), labeled(2 + start, start=10 * start))
    for pattern in (tmp_path / "set", tmp_path / "set" / layout.format("{train,val,test}")):
        data = open_shards(str(pattern))
        assert {name: len(part.targets) for name, part in data.parts.items()} == {
            "train": 2,
            "val": 3,
            "test": 4,
        }
        assert data.train.blocks.tolist() != data.test.blocks.tolist()


def test_a_folder_above_that_is_called_test_makes_no_test_part(tmp_path):
    write_tar(tmp_path / "test" / "photos.tar", labeled(2))
    assert list(open_shards(str(tmp_path / "test" / "photos.tar")).parts) == ["train"]


def test_patterns_are_written_out_and_blocks_are_shards(tmp_path):
    for shard in range(8, 12):
        write_tar(tmp_path / f"a-{shard:03d}.tar", labeled(2, start=2 * shard))
    data = open_shards(str(tmp_path / "a-{008..010}.tar"))
    assert data.name == "a"
    assert data.train.blocks.tolist() == [0, 0, 1, 1, 2, 2]
    assert same(data.train.image(5), photo(21))
    assert len(open_shards(str(tmp_path / "a-0*.tar")).train.names) == 8
    assert len(open_shards(str(tmp_path / "a-01[01].tar")).train.names) == 4
    assert len(open_shards(str(tmp_path)).train.names) == 8


def test_a_shard_that_is_missing_is_named(tmp_path):
    write_tar(tmp_path / "a-0.tar", labeled(2))
    message = failure(tmp_path / "a-{0..1}.tar")
    assert message == f"{tmp_path}/a-1.tar does not exist; did you mean 'a-0.tar'?"


def test_a_name_in_two_shards_is_told_apart_and_the_first_keeps_it(tmp_path):
    for shard in ("a", "b"):
        write_tar(tmp_path / f"{shard}.tar", labeled(2))
    assert list(train(tmp_path)) == ["000.png", "001.png", "b/000.png", "b/001.png"]


def test_a_class_that_only_the_test_part_has_is_named(tmp_path):
    names = ["train/a/1.png", "train/b/1.png", "test/a/1.png", "test/fish/1.png"]
    write_tar(tmp_path / "x.tar", {name: encoded() for name in names})
    assert "has images of 'fish' in test and none in train" in failure(tmp_path / "x.tar")


def test_pictures_without_a_label_are_counted_and_left_out(tmp_path, capsys):
    write_tar(tmp_path / "x.tar", labeled(4) | {"9.png": encoded()})
    assert len(train(tmp_path / "x.tar")) == 4
    assert capsys.readouterr().err == "skipping 1 images without a label\n"


def test_what_is_no_set_of_labelled_pictures_is_one_line(tmp_path):
    write_tar(tmp_path / "flat.tar", {"1.png": encoded(), "2.png": encoded()})
    assert "has no class labels; expected <key>.cls" in failure(tmp_path / "flat.tar")
    write_tar(tmp_path / "one.tar", labeled(3, classes=1))
    assert "has only one class, '0'" in failure(tmp_path / "one.tar")
    write_tar(tmp_path / "text.tar", {"a/1.txt": "x"})
    assert "has no images" in failure(tmp_path / "text.tar")
    (tmp_path / "no.tar").write_bytes(b"not a tar at all" * 100)
    assert "has no images" in failure(tmp_path / "no.tar")
    (tmp_path / "zero.tar").write_bytes(b"")
    assert "has no images (empty file)" in failure(tmp_path / "zero.tar")
    (tmp_path / "zipped.tar").write_bytes(gzip.compress((tmp_path / "one.tar").read_bytes()))
    assert "is compressed; decompress it" in failure(tmp_path / "zipped.tar")
    (tmp_path / "zipped.tar").rename(tmp_path / "zipped.tar.gz")
    assert "is compressed; decompress it" in failure(tmp_path / "zipped.tar.gz")


# Reading


def test_a_source_travels_without_its_open_files(tmp_path):
    source = open_shards(str(write_tar(tmp_path / "x.tar", labeled(4)))).train
    assert same(source.image(0), photo(0))
    again = pickle.loads(pickle.dumps(source))
    assert same(again.image(3), photo(3))


def test_long_and_odd_names_in_a_tar_are_read(tmp_path):
    label, file = "Löwenzahn", "x" * 150 + ".png"
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for number, name in enumerate((f"./{label}/{file}", "b/1.png")):
            (tmp_path / "picture").write_bytes(encoded(number))
            tar.add(tmp_path / "picture", name)
    source = open_shards(str(tmp_path / "x.tar")).train
    assert source.names == [f"{label}/{file}", "b/1.png"]
    assert same(source.image(1), photo(1))


def test_a_broken_picture_is_named_with_its_shard(tmp_path):
    files = labeled(3) | {"001.png": encoded()[:60]}
    source = open_shards(str(write_tar(tmp_path / "x.tar", files))).train
    with pytest.raises(VitrailError, match=r"^001\.png in x\.tar cannot be decoded: "):
        source.image(1)
    assert same(source.image(2), photo(2))


@pytest.mark.parametrize("cut", [300, 1100, 3500])
def test_of_a_truncated_tar_the_whole_pictures_are_kept(tmp_path, capsys, cut):
    path = write_tar(tmp_path / "x.tar", labeled(40))
    with tarfile.open(path) as tar:
        member = tar.getmember("030.png")
    path.write_bytes(path.read_bytes()[: member.offset + cut])
    source = open_shards(str(path)).train
    assert 30 <= len(source.names) <= 32
    assert all(same(source.image(i), photo(i)) for i in range(len(source.names)))
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"{path} is damaged after ")
    open_shards(str(path))
    assert capsys.readouterr().err.startswith(f"{path} is damaged after "), "every time"


def test_a_sparse_tar_that_claims_terabytes_is_a_broken_image(tmp_path):
    with (tmp_path / "x.tar").open("wb") as file:
        for name, size in (("cat/1.png", 1 << 36), ("dog/1.png", len(encoded(1)))):
            member = tarfile.TarInfo(name)
            member.size = size
            file.write(member.tobuf(tarfile.GNU_FORMAT))
            start = file.tell()
            file.write(encoded(1))
            file.seek(start + -(-size // 512) * 512)
        file.truncate(file.tell() + 1024)
    source = open_shards(str(tmp_path / "x.tar")).train
    with pytest.raises(VitrailError, match=r"cat/1\.png in x\.tar is 68.7 GB"):
        source.image(0)
    assert same(source.image(1), photo(1))


def test_headers_that_contradict_themselves_are_one_line(tmp_path):
    for number, odd in enumerate(
        (
            {"GNU.sparse.map": "0,x", "GNU.sparse.size": "9" * 14, "GNU.sparse.name": "a.png"},
            {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9" * 14},
            {"size": "9" * 14},
            {"size": "9" * 30},
        )
    ):
        path = tmp_path / f"{number}.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            for name in ("cat/1.png", "dog/1.png"):
                member = tarfile.TarInfo(name)
                member.size, member.pax_headers = 4, odd
                tar.addfile(member, io.BytesIO(b"1234"))
        assert str(path) in failure(path)


def test_a_label_nested_too_deeply_is_none(tmp_path):
    files = labeled(10) | {"deep.png": encoded(99), "deep.json": "[" * 200_000}
    assert len(open_shards(str(write_tar(tmp_path / "x.tar", files))).train.names) == 10


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x.tar")
    assert "not a regular file" in failure(tmp_path / "x.tar")
    assert "not a regular file" in failure(tmp_path)


def test_rubbish_in_the_middle_of_a_tar_is_said(tmp_path, capsys):
    path = write_tar(tmp_path / "x.tar", labeled(10))
    with tarfile.open(path) as tar:
        place = tar.getmember("005.png").offset
    data = bytearray(path.read_bytes())
    data[place : place + 512] = b"?" * 512
    path.write_bytes(data)
    assert len(train(path)) == 5
    assert "(what follows is not a tar); skipping the rest" in capsys.readouterr().err


def test_an_index_is_made_once_and_again_when_the_shard_changes(tmp_path, cache):
    path = write_tar(tmp_path / "x.tar", labeled(4))
    open_shards(str(path))
    (index,) = (cache / "index").iterdir()
    made = index.stat().st_mtime_ns
    open_shards(str(path))
    assert index.stat().st_mtime_ns == made
    write_tar(path, labeled(6))
    assert len(train(path)) == 6
    for index in (cache / "index").iterdir():
        index.write_bytes(b"rubbish")
    assert len(train(path)) == 6


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path, cache):
    cache.parent.mkdir()
    cache.write_text("in the way")
    assert len(train(write_tar(tmp_path / "x.tar", labeled(4)))) == 4


def test_a_shard_that_changes_while_it_is_used_is_noticed(tmp_path):
    path = write_tar(tmp_path / "x.tar", labeled(4))
    source = open_shards(str(path)).train
    write_tar(path, dict(reversed(labeled(4).items())))
    with pytest.raises(FailureError, match="has changed since it was indexed; open it again"):
        source.image(0)
    path.unlink()
    with pytest.raises(FailureError, match=r"x\.tar \(No such file or directory\)"):
        source.image(0)


# The web


class Handler(SimpleHTTPRequestHandler):
    """Serves files and remembers which."""

    asked: list[str]

    def log_message(self, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()


@pytest.fixture
def site(tmp_path) -> Iterator[tuple[str, list[str]]]:
    """An address, and the list of what was asked for."""
    (tmp_path / "site").mkdir()
    asked: list[str] = []
    kind = type("Listed", (Handler,), {"asked": asked})

    def handler(*args, **settings):
        return kind(*args, directory=str(tmp_path / "site"), **settings)

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def put(tmp_path: Path, shards: int) -> None:
    for shard in range(shards):
        write_tar(tmp_path / "site" / f"x-{shard:02d}.tar", labeled(4, start=4 * shard))


def held(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "files").rglob("*.tar"))


def test_shards_of_the_web_are_fetched_once(tmp_path, site, cache):
    root, asked = site
    put(tmp_path, 2)
    (tmp_path / "site" / "classes.txt").write_text("Katze\nHund")
    source = open_shards(f"{root}/x-{{00..01}}.tar").train
    assert source.labels == ("Katze", "Hund")
    assert all(same(source.image(i), photo(i)) for i in range(8))
    assert sorted(asked) == ["/classes.txt", "/x-00.tar", "/x-01.tar"]
    open_shards(f"{root}/x-{{00..01}}.tar")
    assert len(asked) == 3


def test_an_index_is_enough_to_open_shards_again(tmp_path, site, cache):
    root, asked = site
    put(tmp_path, 2)
    first = open_shards(f"{root}/x-{{00..01}}.tar").train
    for path in (cache / "files").rglob("*.tar"):
        path.unlink()
    asked.clear()
    source = open_shards(f"{root}/x-{{00..01}}.tar").train
    assert source.names == first.names
    assert not asked
    assert same(source.image(5), photo(5))
    assert asked == ["/x-01.tar"]


def test_the_shards_unused_for_longest_make_room(tmp_path, site, cache, monkeypatch):
    root, _ = site
    put(tmp_path, 4)
    size = (tmp_path / "site" / "x-00.tar").stat().st_size
    monkeypatch.setenv("VITRAIL_SHARD_CACHE_GB", str(2.5 * size / 1e9))
    source = open_shards(f"{root}/x-{{00..03}}.tar").train
    assert held(cache) == ["x-02.tar", "x-03.tar"]
    os.utime(next((cache / "files").rglob("x-03.tar")), (0, 0))
    assert same(source.image(0), photo(0))
    assert held(cache) == ["x-00.tar", "x-02.tar"]
    assert same(source.image(12), photo(12))
    # Another process may delete what is open here; it closes, and frees the disk, before the next.
    next((cache / "files").rglob("x-00.tar")).unlink()
    assert same(source.image(1), photo(1))
    assert any(file.is_deleted() for file in tars.files.values())
    assert same(source.image(4), photo(4))
    assert not any(file.is_deleted() for file in tars.files.values())


def test_a_budget_smaller_than_a_shard_still_reads(tmp_path, site, cache, monkeypatch):
    root, _ = site
    put(tmp_path, 3)
    monkeypatch.setenv("VITRAIL_SHARD_CACHE_GB", "0")
    source = open_shards(f"{root}/x-{{00..02}}.tar").train
    assert [same(source.image(i), photo(i)) for i in (0, 11, 5)] == [True] * 3
    assert len(held(cache)) == 1


def read_all(source: Source, seed: int) -> list[bytes]:
    """Every picture, asked for in an order of this process's own."""
    order = np.random.default_rng(seed).permutation(len(source.targets)).tolist()
    seen = {index: source.image(index).tobytes() for index in order}
    return [seen[index] for index in sorted(seen)]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_several_processes_share_a_cache_that_is_too_small(tmp_path, site, monkeypatch):
    root, _ = site
    put(tmp_path, 6)
    size = (tmp_path / "site" / "x-00.tar").stat().st_size
    monkeypatch.setenv("VITRAIL_SHARD_CACHE_GB", str(1.5 * size / 1e9))
    source = open_shards(f"{root}/x-{{00..05}}.tar").train
    with multiprocessing.get_context("fork").Pool(3) as pool:
        told = pool.starmap(read_all, [(source, seed) for seed in range(3)])
    assert told == [[photo(i).tobytes() for i in range(24)]] * 3


def test_what_changes_behind_an_address_is_noticed(tmp_path, site, cache):
    root, _ = site
    put(tmp_path, 1)
    source = open_shards(f"{root}/x-00.tar").train
    next((cache / "files").rglob("*.tar")).unlink()
    write_tar(tmp_path / "site" / "x-00.tar", dict(reversed(labeled(4).items())))
    with pytest.raises(FailureError, match="has changed since it was indexed; open it again"):
        source.image(0)
    again = open_shards(f"{root}/x-00.tar").train
    assert again.names == [f"00{i}.png" for i in (3, 2, 1, 0)]
    assert same(again.image(0), photo(3))


def test_a_shard_that_is_not_there_is_one_line(tmp_path, site):
    root, _ = site
    assert failure(f"{root}/x-0.tar").endswith(f"for {root}/x-0.tar; check the address")


def test_a_budget_that_is_no_number_is_refused(tmp_path, site, monkeypatch):
    root, _ = site
    put(tmp_path, 1)
    monkeypatch.setenv("VITRAIL_SHARD_CACHE_GB", "much")
    assert failure(f"{root}/x-00.tar").startswith("VITRAIL_SHARD_CACHE_GB=much: expected")


def test_an_archive_of_part_and_class_folders_opens_as_it_is(tmp_path):
    labels = ("cat", "ship", "airplane", "cat")
    files = {f"cifar10/test/{c}/{i:05d}.webp": encoded(i, "webp") for i, c in enumerate(labels)}
    data = open_shards(str(write_tar(tmp_path / "cifar10-test.tar", files)))
    assert list(data.parts) == ["test"]
    assert data.labels == ("airplane", "cat", "ship")
    assert np.bincount(data.test.targets).tolist() == [1, 2, 1]
    assert data.test.names[0] == "cat/00000.webp"
    assert data.test.image(3).size == (16, 12)
