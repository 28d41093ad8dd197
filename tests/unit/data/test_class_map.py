"""Which outputs of a model the class folders are."""

from __future__ import annotations

from pathlib import Path

import pytest
from timm.data import ImageNetInfo

from bastion.data.class_map import class_columns
from bastion.errors import BastionError

ROOT = Path("folder")
# Hendrycks et al. 2021: the classes of ImageNet-A among ImageNet's 1,000.
IMAGENET_A = """
6 11 13 15 17 22 23 27 30 37 39 42 47 50 57 70 71 76 79 89 90 94 96 97 99 105 107 108 110 113 124 125 130
132 143 144 150 151 207 234 235 254 277 283 287 291 295 298 301 306 307 308 309 310 311 313 314 315 317 319 323 324 326
327 330 334 335 336 347 361 363 372 378 386 397 400 401 402 404 407 411 416 417 420 425 428 430 437 438 445 456 457 461
462 470 472 483 486 488 492 496 514 516 528 530 539 542 543 549 552 557 561 562 569 572 573 575 579 589 606 607 609 614
626 627 640 641 642 643 658 668 677 682 684 687 701 704 719 736 746 749 752 758 763 765 768 773 774 776 779 780 786 792
797 802 803 804 813 815 820 823 831 833 835 839 845 847 850 859 862 870 879 880 888 890 897 900 907 913 924 932 933 934
937 943 945 947 951 954 956 957 959 971 972 980 981 984 986 987 988"""


def test_imagenets_classes_are_known_by_id_number_and_name() -> None:
    folders = ["n01440764", "n02102040", "0217", "7", "999", "English_springer", "toilet tissue", "Tinca tinca"]
    columns = [class_columns("imagenet", [folder], ROOT)[0] for folder in folders]
    assert columns == [0, 217, 217, 7, 999, 217, 999, 0]


def test_the_folders_of_imagenet_a_are_its_200_columns() -> None:
    columns = tuple(map(int, IMAGENET_A.split()))
    ids = ImageNetInfo("imagenet-1k").label_names()
    assert class_columns("imagenet", sorted(ids[column] for column in columns), ROOT) == columns
    assert len(columns) == 200


def test_numbers_are_not_in_alphabetical_order() -> None:
    """As in ImageNet-V2: the folder `10` stands before `2`."""
    folders = sorted(str(number) for number in range(1000))
    assert folders[:3] == ["0", "1", "10"]
    assert class_columns("imagenet", folders, ROOT) == tuple(map(int, folders))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("map.json", '{"cat": 281, "big dog": 5, "unused": 7}'),
        ("map.csv", "cat,281\nbig dog,5\n\nunused, 7\n"),
        ("map.txt", "cat 281\nbig dog\t5\n"),
    ],
)
def test_a_map_may_be_a_file(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert class_columns(str(tmp_path / name), ["big dog", "cat"], ROOT) == (5, 281)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["n01440764", "n99999999"], "folder: 1 of 2 class folders are no ImageNet class: n99999999; rename or remove"),
        (["1000"], "no ImageNet class: 1000"),
        (["crane"], "no ImageNet class: crane"),  # two classes have this name
        (["0", "n01440764"], "folders 0 and n01440764 are both column 0; each needs its own"),
    ],
)
def test_folders_that_are_no_classes_are_named(folders: list[str], message: str) -> None:
    with pytest.raises(BastionError, match=message):
        class_columns("imagenet", folders, ROOT)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("map.json", '{"cat": 281, ', "map.json: not readable as JSON, or cut off"),
        ("map.json", '{"cat": "281"}', 'map.json: expected {"folder": column, …}'),
        ("map.json", '{"cat": -1}', 'map.json: expected {"folder": column, …}'),
        ("map.json", "[1, 2]", 'map.json: expected {"folder": column, …}'),
        ("map.csv", "folder,column\n", "line 1 is not a folder and its column, such as `cat,281`: 'folder,column'"),
        ("map.csv", "cat,1\ncat,2\n", "line 2 has a folder for the second time: 'cat,2'"),
        ("map.csv", "cat," + "9" * 5000, "line 1 is not a folder and its column"),
        ("map.csv", "cat" + " " * 100_000 + "x", "line 1 is not a folder and its column"),
        ("map.json", '{"cat": 1' + "0" * 300 + "}", "columns being numbers from 0"),
        ("map.csv", "dog,1\n", "1 of 1 class folders are no folder of .*map.csv: cat"),
        ("map.csv", b"\xff\xfe", "map.csv: cannot be read"),
    ],
)
def test_a_broken_file_is_explained(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BastionError, match=message):
        class_columns(str(path), ["cat"], ROOT)


def test_an_unknown_map_is_told() -> None:
    with pytest.raises(BastionError, match=r"no file imagnet, and no map of this name; did you mean 'imagenet'\?"):
        class_columns("imagnet", ["cat"], ROOT)
