import numpy as np

from jaxlaunch.trainer.sources.synthetic import Images, Tokens


def test_example_depends_on_its_index_alone() -> None:
    for once, repeated in [
        (Images(9, (4, 4), 3, first=0), Images(9, (4, 4), 3, first=0)),
        (Tokens(9, 8, 16, first=0),) * 2,
    ]:
        for index in (5, 2, 5):
            for key, value in once[index].items():
                assert np.array_equal(value, repeated[index][key])


def test_evaluation_uses_other_examples() -> None:
    train, held_out = Images(50, (6, 6), 4, first=0), Images(50, (6, 6), 4, first=50)
    pictures = {int(train[i]["label"]): train[i]["image"].astype(int) for i in range(50)}
    for index in range(50):
        example = held_out[index]
        distance = {
            label: int(abs(picture - example["image"]).sum()) for label, picture in pictures.items()
        }
        assert min(distance, key=lambda label: distance[label]) == example["label"]
        assert min(distance.values()) > 0


def test_most_tokens_follow_the_rule() -> None:
    source = Tokens(40, 32, 8, first=0)
    pairs = np.stack([source[i]["tokens"] for i in range(40)])
    assert pairs.shape == (40, 33) and pairs.dtype == np.int32 and pairs.max() < 8
    count_VV = np.zeros((8, 8))
    np.add.at(count_VV, (pairs[:, :-1], pairs[:, 1:]), 1)
    assert count_VV.max(1).sum() / count_VV.sum() > 0.8
