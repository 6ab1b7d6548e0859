"""Data set YAMLs: names, where relative paths lead, what counts as an image, and messages that say what to mend."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from data import sources
from data.builtin import shapes, shapes_cls
from data.sources import DataSpec, images_below, label_file, overlap, read_spec
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def write_spec(file: Path, **content: object) -> Path:
    """A data YAML of these keys; `names` is one class unless given (None leaves it out)."""
    content = {"names": ["thing"], **content}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
    return file


def touch(folder: Path, *names: str) -> list[Path]:
    """Files without content: sources look at names alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return [folder / name for name in names]


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    """Where the tests put their data YAML: in a folder `set`, beside `set/images/train` with two images."""
    touch(tmp_path / "set/images/train", "a.jpg", "b.png")
    return tmp_path / "set/data.yaml"


# names


@pytest.mark.parametrize("names", [{0: "cat", 1: "dog"}, {1: "dog", 0: "cat"}, ["cat", "dog"]])
@pytest.mark.parametrize("nc", [None, 2])
def test_names_are_a_mapping_or_a_list(yaml_file: Path, names: object, nc: int | None) -> None:
    spec = read_spec(write_spec(yaml_file, train="images/train", names=names, nc=nc))
    assert list(spec.names.items()) == [(0, "cat"), (1, "dog")]


def test_more_than_ten_names_keep_their_numbers(yaml_file: Path) -> None:
    names = {number: f"class {number}" for number in range(12)}
    assert read_spec(write_spec(yaml_file, names=names)).names == names


def test_names_that_yaml_reads_as_other_things_become_text(yaml_file: Path) -> None:
    yaml_file.write_text("names:\n  0: 7\n  1: 1.5\n")
    assert read_spec(yaml_file).names == {0: "7", 1: "1.5"}


def test_names_may_be_missing_where_nc_counts_the_classes(yaml_file: Path) -> None:
    assert read_spec(write_spec(yaml_file, names=None, nc=3)).names == {0: "0", 1: "1", 2: "2"}


@pytest.mark.parametrize("content", [{"nc": 0}, {"names": "cat"}, {"names": []}, {"names": {}}])
def test_without_any_class_the_message_says_how_to_name_them(yaml_file: Path, content: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"data\.yaml: `names` must list the classes"):
        read_spec(write_spec(yaml_file, **{"names": None, **content}))


def test_neither_names_nor_nc_are_no_names(yaml_file: Path) -> None:
    assert read_spec(write_spec(yaml_file, names=None)).names == {}


@pytest.mark.parametrize("nc", [1, 3, 0])
def test_another_nc_than_names_is_refused(yaml_file: Path, nc: int) -> None:
    with pytest.raises(UserError, match=rf"data\.yaml: `nc` is {nc} but `names` has 2 classes"):
        read_spec(write_spec(yaml_file, names=["cat", "dog"], nc=nc))


@pytest.mark.parametrize("numbers", [(1, 2), (0, 2), (-1, 0), ("0", "1"), (0.5, 1)])
def test_class_numbers_other_than_0_to_n_are_refused(yaml_file: Path, numbers: tuple[object, object]) -> None:
    with pytest.raises(UserError, match=r"data\.yaml: the numbers under `names` must be 0 to 1, each once"):
        read_spec(write_spec(yaml_file, names=dict.fromkeys(numbers, "cat")))


# keys


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("tain", "train"),
        ("vall", "val"),
        ("name", "names"),
        ("pth", "path"),
        ("Train", "train"),
        ("spilt", "split"),
        ("split-seed", "split_seed"),
        ("default", "defaults"),
    ],
)
def test_a_misspelt_key_is_an_error_that_names_the_right_one(yaml_file: Path, key: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"data\.yaml: unknown key '{key}' \(did you mean '{meant}'\?\)"):
        read_spec(write_spec(yaml_file, **{key: "images/train"}))


@pytest.mark.parametrize("key", ["license", "description", "roboflow", "kpt_shape", "version", "date", "author", "url"])
def test_keys_of_other_programs_are_let_pass(yaml_file: Path, key: str) -> None:
    assert len(read_spec(write_spec(yaml_file, train="images/train", **{key: "text"})).images("train")) == 2


@pytest.mark.parametrize("download", ["https://example.com/data.zip", "raise SystemExit('never run')"])
def test_a_download_is_known_and_not_run(yaml_file: Path, download: str) -> None:
    assert read_spec(write_spec(yaml_file, download=download)).names == {0: "thing"}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path, int]]:
    """What was drawn, where and with which seed: nothing is, but for one file."""
    calls: list[tuple[str, Path, int]] = []
    for name, module in (("shapes", shapes), ("shapes-cls", shapes_cls)):

        def draw(folder: Path, seed: int, name: str = name) -> None:
            calls.append((name, folder, seed))
            touch(folder / "images/train", "drawn.jpg")

        monkeypatch.setattr(module, "draw_dataset", draw)
    return calls


@pytest.mark.parametrize(
    ("draw", "name", "seed"),
    [
        (5, "shapes", 5),
        (0, "shapes", 0),
        ({"shapes": 5}, "shapes", 5),
        ({"shapes-cls": 0}, "shapes-cls", 0),
        ({"shapes-cls": 7}, "shapes-cls", 7),
    ],
)
def test_draw_makes_a_built_in_set_at_its_path(
    yaml_file: Path, drawn: list[tuple[str, Path, int]], draw: object, name: str, seed: int
) -> None:
    spec = read_spec(write_spec(yaml_file, path="../drawn", train="images/train", draw=draw))
    ((found, folder, given),) = drawn
    assert (found, folder.resolve(), given) == (name, yaml_file.parents[1] / "drawn", seed)
    assert spec.images("train") == [yaml_file.parents[1] / "drawn/images/train/drawn.jpg"]


@pytest.mark.parametrize(
    "draw",
    [-1, 0.5, True, "shapes-cls", ["shapes-cls"], {}, {"shapes-cls": -1}, {"shapes-cls": True}, {"circles": 0},
     {"shapes-cls": None}, {"shapes": 0, "shapes-cls": 0}, {5: 0}],
)  # fmt: skip
def test_what_nobody_can_draw_is_refused(yaml_file: Path, drawn: list[tuple[str, Path, int]], draw: object) -> None:
    with pytest.raises(
        UserError, match=r"data\.yaml: `draw` must be the seed .* or one of shapes, shapes-cls with its"
    ):
        read_spec(write_spec(yaml_file, draw=draw))
    assert drawn == []


def test_nothing_is_drawn_unasked(yaml_file: Path, drawn: list[tuple[str, Path, int]]) -> None:
    read_spec(write_spec(yaml_file, train="images/train"))
    assert drawn == []


@pytest.mark.parametrize(("share", "seed"), [(0.2, 0), (0, 3), (0.999, 2**70)])
def test_a_share_is_held_out_by_a_seed(yaml_file: Path, share: float, seed: int) -> None:
    spec = read_spec(write_spec(yaml_file, split=share, split_seed=seed))
    assert (spec.split, spec.split_seed) == (share, seed)


@pytest.mark.parametrize("share", [1, -0.1, 20, True, "20%", [0.2], float("nan"), float("inf")])
def test_a_share_outside_0_to_1_is_refused(yaml_file: Path, share: object) -> None:
    with pytest.raises(UserError, match=r"data\.yaml: `split` must be the share to hold out for validation"):
        read_spec(write_spec(yaml_file, split=share))


@pytest.mark.parametrize("seed", [-1, 0.5, 1.0, True, "one"])
def test_a_seed_that_is_no_whole_number_is_refused(yaml_file: Path, seed: object) -> None:
    with pytest.raises(UserError, match=r"data\.yaml: `split_seed` must be a whole number from 0, not"):
        read_spec(write_spec(yaml_file, split=0.2, split_seed=seed))


def test_defaults_are_suggestions_for_flags(yaml_file: Path) -> None:
    values = {"imgsz": 64, "epochs": 3, "hyp": "a.yaml"}
    assert read_spec(write_spec(yaml_file, defaults=values)).defaults == values
    assert read_spec(write_spec(yaml_file, defaults={})).defaults == {}
    with pytest.raises(UserError, match=r"data\.yaml: unknown key 'epoch' under `defaults` \(did you mean 'epochs'"):
        read_spec(write_spec(yaml_file, defaults={"epoch": 3}))
    with pytest.raises(UserError, match=r"data\.yaml: `imgsz` under `defaults` is 0, which --imgsz refuses"):
        read_spec(write_spec(yaml_file, defaults={"imgsz": 0}))


def test_the_shipped_flowers_are_to_be_split() -> None:
    spec = read_spec(ROOT / "data/flowers.yaml")
    assert (spec.names, spec.entries, spec.split, spec.split_seed) == ({}, {}, 0.2, 0)


def test_the_shipped_shapes_for_classification_are_drawn(tmp_path: Path, drawn: list[tuple[str, Path, int]]) -> None:
    (tmp_path / "data").mkdir()
    spec = read_spec(shutil.copy(ROOT / "data/shapes-cls.yaml", tmp_path / "data/a.yaml"))
    ((name, folder, seed),) = drawn
    assert (name, folder.resolve(), seed) == ("shapes-cls", tmp_path / "datasets/shapes-cls", 0)
    assert (spec.names, spec.entries) == ({}, {"train": ("train",), "val": ("val",)})
    assert {"hyp", "imgsz", "epochs", "batch_size"} <= set(spec.defaults)
    assert (ROOT / spec.defaults["hyp"]).is_file()


@pytest.mark.parametrize("name", ["coco", "coco128"])
def test_the_shipped_sets_end_with_coco_names(name: str) -> None:
    content = yaml.safe_load((ROOT / "data" / f"{name}.yaml").read_text(encoding="utf-8"))
    assert list(content)[-1] == "names"
    assert list(content["names"]) == list(range(80))
    assert [content["names"][k] for k in (0, 1, 11, 79)] == ["person", "bicycle", "stop sign", "toothbrush"]
    assert set(content) <= set(sources.DATA_KEYS)


# where relative paths lead


def test_entries_are_relative_to_path_and_path_to_the_folder_of_the_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = touch(tmp_path / "store/photos/train", "a.jpg")
    monkeypatch.chdir(touch(tmp_path / "elsewhere", "x")[0].parent)
    spec = read_spec(write_spec(tmp_path / "configs/data.yaml", path="../store", train="photos/train"))
    assert spec.images("train") == images


def test_path_is_relative_to_the_working_folder_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = touch(tmp_path / "work/store/train", "a.jpg")
    monkeypatch.chdir(tmp_path / "work")
    spec = read_spec(write_spec(tmp_path / "configs/data.yaml", path="store", train="train"))
    assert spec.images("train") == images


def test_the_folder_of_the_yaml_comes_before_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = touch(tmp_path / "configs/store/train", "beside.jpg")
    touch(tmp_path / "work/store/train", "working.jpg")
    monkeypatch.chdir(tmp_path / "work")
    spec = read_spec(write_spec(tmp_path / "configs/data.yaml", path="store", train="train"))
    assert spec.images("train") == beside


@pytest.mark.parametrize("place", ["configs", "work"])
def test_without_path_entries_are_relative_to_either_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    images = touch(tmp_path / place / "train", "a.jpg")
    (tmp_path / "work").mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path / "work")
    assert read_spec(write_spec(tmp_path / "configs/data.yaml", train="train")).images("train") == images


def test_the_yaml_may_be_named_relative_to_the_working_folder(yaml_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_spec(yaml_file, path=".", train="images/train")
    monkeypatch.chdir(yaml_file.parent.parent)
    spec = read_spec(Path("set/data.yaml"))
    monkeypatch.chdir("/")
    assert spec.images("train") == [yaml_file.parent / "images/train" / name for name in ("a.jpg", "b.png")]


def test_absolute_paths_stay(tmp_path: Path) -> None:
    images = touch(tmp_path / "far/train", "a.jpg")
    spec = read_spec(write_spec(tmp_path / "set/data.yaml", path="no such folder", train=str(tmp_path / "far/train")))
    assert spec.images("train") == images


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = touch(tmp_path / "home/store/train", "a.jpg")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    spec = read_spec(write_spec(tmp_path / "set/data.yaml", path="~/store", train="train"))
    assert spec.images("train") == images


def test_a_missing_folder_is_named_with_its_key_and_every_place_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = write_spec(tmp_path / "set/data.yaml", path="store", val="images/val", test="not/used")
    spec = read_spec(file)  # a split that nobody asks for may be absent
    with pytest.raises(UserError) as caught:
        spec.images("val")
    assert str(caught.value) == (
        f"{file}: `val: images/val` does not exist; "
        f"looked for {tmp_path}/set/store/images/val or {tmp_path}/work/store/images/val"
    )


def test_the_folder_of_path_is_the_first_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work/store").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    spec = read_spec(write_spec(tmp_path / "set/data.yaml", path="./store"))
    assert spec.root() == tmp_path / "work/store"
    (tmp_path / "set/store").touch()  # a file is no folder
    assert spec.root() == tmp_path / "work/store"
    (tmp_path / "set/store").unlink()
    (tmp_path / "set/store").mkdir()
    assert spec.root() == tmp_path / "set/store"


def test_a_missing_folder_of_path_is_named_with_every_place_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    file = write_spec(tmp_path / "set/data.yaml", path="../store/./x")
    with pytest.raises(UserError) as caught:
        read_spec(file).root()
    assert str(caught.value) == f"{file}: `path:` does not exist; looked for {tmp_path}/store/x"


def test_the_places_of_a_split_are_its_folders_and_lists_in_order(yaml_file: Path) -> None:
    (yaml_file.parent / "a.txt").touch()
    spec = read_spec(write_spec(yaml_file, train=["images/train", "a.txt", "images"], val="no"))
    assert spec.locations("train") == [yaml_file.parent / name for name in ("images/train", "a.txt", "images")]
    with pytest.raises(UserError, match=r"`val: no` does not exist"):
        spec.locations("val")
    with pytest.raises(UserError, match=r"data\.yaml has no `test:`"):
        spec.locations("test")


@pytest.mark.parametrize("entry", [3, {"folder": "images/train"}, ["images/train", 3]])
def test_an_entry_that_is_no_path_is_refused(yaml_file: Path, entry: object) -> None:
    with pytest.raises(UserError, match=r"data\.yaml: `train` must be a path or a list of paths, not"):
        read_spec(write_spec(yaml_file, train=entry))


def test_a_path_that_is_no_text_is_refused(yaml_file: Path) -> None:
    with pytest.raises(UserError, match=r"data\.yaml: `path` must be a folder's name, not \['a'\]"):
        read_spec(write_spec(yaml_file, path=["a"], train="images/train"))


# the images of a split


def test_a_folder_is_searched_at_every_depth_for_image_suffixes_in_either_case(tmp_path: Path) -> None:
    wanted = touch(tmp_path / "images", "b.JPG", "a.png", "d.Jpeg", "e.tif", "f.TIFF", "g.bmp", "h.webp")
    wanted += touch(tmp_path / "images/deep/deeper", "a.jpg", "two.dots.jpg")
    touch(tmp_path / "images", "notes.txt", "data.json", "film.mp4", "jpg", "c.jpg.bak")
    assert read_spec(write_spec(tmp_path / "data.yaml", train="images")).images("train") == sorted(wanted)


def test_a_list_file_names_images_beside_it_in_the_working_folder_or_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = touch(tmp_path / "set/images", "a.jpg", "b.jpg")
    working = touch(tmp_path / "work/images", "c.JPG")
    anywhere = touch(tmp_path / "far", "d.png")
    lines = ["./images/a.jpg", "images/b.jpg", "images/c.JPG", str(anywhere[0]), "", "  ", "notes.md"]
    (tmp_path / "set/lists").mkdir()
    (tmp_path / "set/train.txt").write_text("\ufeff" + "\r\n".join(lines), encoding="utf-8", newline="")
    monkeypatch.chdir(tmp_path / "work")
    spec = read_spec(write_spec(tmp_path / "set/data.yaml", train="train.txt"))
    assert spec.images("train") == sorted(beside + working + anywhere)


def test_a_list_file_is_relative_to_itself_not_to_path(tmp_path: Path) -> None:
    images = touch(tmp_path / "set/lists/images", "a.jpg")
    touch(tmp_path / "set/images", "a.jpg")
    (tmp_path / "set/lists/train.txt").write_text("./images/a.jpg\n")
    spec = read_spec(write_spec(tmp_path / "set/data.yaml", path=".", train="lists/train.txt"))
    assert spec.images("train") == images


def test_a_split_may_list_folders_and_list_files_and_gives_each_image_once(tmp_path: Path) -> None:
    first = touch(tmp_path / "one", "b.jpg", "a.jpg")
    second = touch(tmp_path / "two", "c.jpg")
    (tmp_path / "some.txt").write_text("./two/c.jpg\n./one/a.jpg\n./one/../one/b.jpg\n")
    spec = read_spec(write_spec(tmp_path / "data.yaml", val=["one", "some.txt", "one"]))
    assert spec.images("val") == sorted(first + second)
    assert spec.entries["val"] == ("one", "some.txt", "one")


def test_a_file_that_is_no_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff\xe0\x00")
    spec = read_spec(write_spec(tmp_path / "data.yaml", train="a.jpg"))
    with pytest.raises(UserError, match=r"a\.jpg is neither a folder nor a readable text list"):
        spec.images("train")


def test_an_absent_or_empty_split_is_named(yaml_file: Path) -> None:
    (yaml_file.parent / "images/val").mkdir()
    spec = read_spec(write_spec(yaml_file, train="images/train", val="images/val", test=""))
    with pytest.raises(UserError, match=r"data\.yaml has no `test:`"):
        spec.images("test")
    with pytest.raises(UserError, match=r"data\.yaml: `val:` has no images in .*/set/images/val"):
        spec.images("val")


def test_images_are_sorted_folder_by_folder(tmp_path: Path) -> None:
    for folder in ("a", "a-b", "a/c", "a b"):
        touch(tmp_path / "images" / folder, "x.jpg", "-.jpg", "c.jpg")
    images = read_spec(write_spec(tmp_path / "data.yaml", train="images")).images("train")
    assert images == sorted(tmp_path.rglob("*.jpg"))
    assert images != sorted(images, key=str)
    assert sorted(images_below(tmp_path)) == images


@pytest.mark.parametrize(
    "line", ["images/a.jpg/", "images/a.jpg/.", "images/./a.jpg", "images//a.jpg", "../set/images/a.jpg"]
)
def test_a_line_of_a_list_may_be_written_in_any_way(tmp_path: Path, line: str) -> None:
    images = touch(tmp_path / "set/images", "a.jpg")
    (tmp_path / "set/train.txt").write_text(line)
    assert read_spec(write_spec(tmp_path / "set/data.yaml", train="train.txt")).images("train") == images


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["a", "B", ".", "..", ".jpg", ".PNG", ".txt", "/", " "]), max_size=6).map("".join))
def test_the_suffix_of_a_line_is_that_of_its_path(line: str) -> None:
    assert sources._is_image(line) == (Path(line).suffix.lower() in sources.IMAGE_SUFFIXES)


def test_images_of_both_splits_are_counted_through_links(tmp_path: Path) -> None:
    images = touch(tmp_path / "real", "a.jpg", "b.jpg")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    again = [tmp_path / "link/b.jpg", tmp_path / "link/c.jpg"]
    (sentence,) = overlap(images, again)
    assert sentence.startswith(f"warning: 1 of the 2 validation images are training images too, such as {images[1]};")
    assert overlap(images, again[1:]) == []


def test_links_are_followed_and_loops_end(tmp_path: Path) -> None:
    outside = touch(tmp_path / "outside", "b.jpg")[0].parent
    folder = touch(tmp_path / "images", "a.jpg")[0].parent
    (folder / "deep").mkdir()
    (folder / "deep/up").symlink_to(folder)
    (folder / "self").symlink_to(folder)
    (folder / "more").symlink_to(outside)
    spec = read_spec(write_spec(tmp_path / "data.yaml", train="images"))
    assert spec.images("train") == [folder / "a.jpg", folder / "more/b.jpg"]


def test_two_links_to_one_folder_give_its_images_once(tmp_path: Path) -> None:
    outside = touch(tmp_path / "outside", "a.jpg", "b.jpg")[0].parent
    (tmp_path / "images").mkdir()
    for name in ("one", "two"):
        (tmp_path / "images" / name).symlink_to(outside)
    found = read_spec(write_spec(tmp_path / "data.yaml", train="images")).images("train")
    assert [image.name for image in found] == ["a.jpg", "b.jpg"]


# label files


@pytest.mark.parametrize(
    ("image", "labels"),
    [
        ("/set/images/train/a.jpg", "/set/labels/train/a.txt"),
        ("/images/set/images/a.jpg", "/images/set/labels/a.txt"),
        ("/set/images/images/a.jpg", "/set/images/labels/a.txt"),
        ("/set/images/a.b.JPEG", "/set/labels/a.b.txt"),
        ("/set/my images/images2/Images/a.png", "/set/my images/images2/Images/a.txt"),
        ("/set/photos/a.png", "/set/photos/a.txt"),
        ("/set/photos/images.jpg", "/set/photos/images.txt"),
        ("images/a.jpg", "labels/a.txt"),
    ],
)
def test_the_last_folder_called_images_becomes_labels(image: str, labels: str) -> None:
    assert label_file(Path(image)) == Path(labels)


def label_by_parts(image: Path) -> Path:
    """`label_file` by the parts of the path."""
    parts = list(image.parts)
    for place in range(len(parts) - 2, -1, -1):
        if parts[place] == "images":
            parts[place] = "labels"
            break
    return Path(*parts).with_suffix(".txt")


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(["", "/", "../"]),
    st.lists(st.sampled_from(["images", "labels", "a", "images.jpg", ".images", "Images", "ä"]), max_size=4),
    st.sampled_from(["a", "a.b", ".a", "images", "a..b", "images/images"]),
    st.sampled_from([".jpg", ".PNG"]),
)
def test_the_label_file_is_that_by_the_parts_of_the_path(root: str, folders: list[str], stem: str, suffix: str) -> None:
    image = Path(root, *folders, stem + suffix)
    assert label_file(image) == label_by_parts(image)
    assert sources.label_name(str(image)) == str(label_by_parts(image))


def test_a_spec_is_a_plain_value(yaml_file: Path) -> None:
    spec = read_spec(write_spec(yaml_file, train="images/train"))
    assert spec == DataSpec(yaml_file, {0: "thing"}, (yaml_file.parent, Path.cwd()), {"train": ("images/train",)})
