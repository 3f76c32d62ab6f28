"""Device maps: how they are parsed, which are rejected with which message, what `auto` picks."""

import pytest

from roll_lite.device_map import (
    DeviceMap,
    Role,
    auto_device_map,
    format_ranks,
    parse_device_map,
)
from roll_lite.models.config import parse_config, shape_config
from roll_lite.models.shapes import SHAPES

QWEN = shape_config("qwen3-8b")  # 8 kv heads, 12288 intermediate, 151936 = 2^7 x 1187 vocabulary
SEVEN = {"num_attention_heads": 7, "num_key_value_heads": 7}
TINY = parse_config(SHAPES["qwen3-0.6b"] | {"vocab_size": 71, "hidden_size": 128} | SEVEN)
ALL_ROLES = ["train", "generate", "reference"]
GIB = 2**30


def test_parsing():
    device_map = parse_device_map("train=0-3,tp=2  generate=4-5+7 reference=6 critic=all", 8)
    assert device_map.names == ("train", "generate", "reference", "critic")
    assert device_map["train"] == Role("train", (0, 1, 2, 3), 2)
    assert device_map["train"].replicas == ((0, 1), (2, 3))
    assert device_map["train"].num_replicas == 2
    assert device_map["generate"].replicas == ((4,), (5,), (7,))
    assert device_map["reference"].ranks == (6,)
    assert device_map["critic"].ranks == tuple(range(8))
    assert "reference" in device_map and "judge" not in device_map


def test_a_replica_has_the_ranks_of_its_context():
    text = "train=0-7,tp=2,cp=2,fsdp=1 generate=all"
    train = parse_device_map(text, 8)["train"]
    assert train.replicas == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (train.ranks_per_copy, train.num_copies) == (4, 2)
    assert parse_device_map("train=all,cp=4", 8)["train"].ranks_per_copy == 8
    assert parse_device_map(text, 8).text == "train=all,tp=2,cp=2,fsdp=1 generate=all"
    assert str(parse_device_map(text, 8)).splitlines() == [
        "role      ranks  tp  cp  replicas  fsdp",
        "train     0-7    2   2   2         1",
        "generate  0-7    1   1   8",
    ]


@pytest.mark.parametrize(
    ("text", "spare"),
    [
        ("train=all generate=all", []),
        ("train=0-1 generate=2-3", [2, 3]),
        ("train=0-1 generate=1-3", [2, 3]),
        ("train=0-2 generate=3", []),  # the only engine
        ("train=2-3 generate=0-1", [1]),  # rank 0 is the controller
        ("train=0 generate=0-3,tp=2", [2, 3]),
        ("train=0-1 generate=1-2+4-5,tp=2 judge=3", [4, 5]),
        ("train=0 generate=1-2 judge=1", [2]),
    ],
)
def test_ranks_whose_engines_others_can_replace(text, spare):
    device_map = parse_device_map(text, 6)
    assert [rank for rank in range(6) if device_map.is_spare(rank)] == spare


def test_shared_ranks():
    device_map = parse_device_map("train=0-3 generate=2-5 reference=0-3", 7)
    assert [role.name for role in device_map.roles_of(2)] == ["train", "generate", "reference"]
    assert [role.name for role in device_map.roles_of(5)] == ["generate"]
    assert device_map.roles_of(6) == ()


def test_the_table_is_readable():
    table = str(parse_device_map("train=0-3,tp=2 generate=0-3+6 reference=0-3", 8))
    assert table.splitlines() == [
        "role       ranks  tp  replicas",
        "train      0-3    2   2",
        "generate   0-3,6  1   5",
        "reference  0-3    1   4",
    ]


def test_ranks_are_written_compactly():
    assert format_ranks((0, 1, 2, 3, 6)) == "0-3,6"
    assert format_ranks((5,)) == "5"
    assert format_ranks(range(4096)) == "0-4095"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no roles.*train=all"),
        ("train", "'train' in the device map is not understood; write role=RANKS"),
        ("train=", "'train=' .*not understood"),
        ("train=0-3,dp=2", r"'train=0-3,dp=2'.*role=RANKS\[,tp=N\]\[,cp=N\]\[,ep=N\]\[,fsdp=N\]"),
        ("train=0-3,cp=3", "train: cp=3 does not divide its 4 ranks; use 1, 2 or 4"),
        ("train=0-3,tp=2,cp=4", "cp=4 does not divide its 2 groups of tp=2; use 1 or 2"),
        ("train=0-3,6", "'train=0-3,6'.*0-1[+]4-5"),
        ("train=0-3, tp=2", "'train=0-3,'"),
        ("tp=2", "'tp=2'"),
        ("train=0-3,tp=2,tp=4", "not understood"),
        ("train=0..3", r"'0\.\.3' in train=0\.\.3 is not a range"),
        ("train=3-0", "'3-0' in train=3-0 is not a range"),
        ("train=0-", "'0-' in train=0-"),
        ("train=0-9999999999999", "role train: there is no rank 9999999999999; world size 8"),
        ("train=4-8", "role train: there is no rank 8; world size 8 has 0-7"),
        ("train=0-3+2-4", "role train: ranks must ascend; use train=0-4"),
        ("train=4-5+0-1", "role train: ranks must ascend; use train=0-1[+]4-5"),
        ("train=0-3 generate=4 train=5", "role train appears 2 times; list all its ranks once"),
        ("train=0-3,tp=0", "role train: tp=0 must be at least 1"),
        ("train=0-3,tp=3", "role train: tp=3 does not divide its 4 ranks; use 1, 2 or 4"),
        ("train=all,tp=2,fsdp=3", "fsdp=3 does not divide its 4 replicas; use 1, 2 or 4"),
        ("train=all,fsdp=0", "fsdp=0 does not divide its 8 replicas; use 1, 2, 4 or 8"),
        ("fsdp=2", "'fsdp=2'"),
        ("ep=2", "'ep=2'"),
        ("train=all,ep=0", "train: ep=0 does not divide its 8 data-parallel ranks; use 1, 2, 4 or"),
        ("train=all,tp=2,ep=8", "ep=8 does not divide its 4 data-parallel ranks; use 1, 2 or 4"),
        ("train=all,ep=4,fsdp=2", "ep=4 does not divide its 2 data-parallel ranks; use 1 or 2"),
        ("generate=all,ep=2", "generate: ep=2 does not divide its 1 ranks of an engine; use 1"),
    ],
)  # fmt: skip
def test_invalid_text_is_rejected_with_the_remedy(text, message):
    with pytest.raises(ValueError, match=message):
        parse_device_map(text, 8)


def test_copies_of_sharded_weights():
    """Of 16 ranks with tp=2, as on two machines: 4 replicas share the weights, twice."""
    device_map = parse_device_map("train=all,tp=2,fsdp=4 generate=all", 16)
    train = device_map["train"]
    assert (train.num_replicas, train.ranks_per_copy, train.num_copies) == (8, 8, 2)
    assert parse_device_map(device_map.text, 16) == device_map
    assert str(device_map).splitlines()[1].split() == ["train", "0-15", "2", "8", "4"]
    assert device_map["generate"].num_copies == 1


def test_experts_are_dealt_over_ranks():
    device_map = parse_device_map("train=all,tp=2,ep=4 generate=0-1,tp=2,ep=2 reference=0", 8)
    assert (device_map["train"].data_ep, device_map["generate"].data_ep) == (4, 1)
    assert parse_device_map(device_map.text, 8) == device_map
    assert str(device_map).splitlines()[:2] == [
        "role       ranks  tp  ep  replicas",
        "train      0-7    2   4   4",
    ]
    mixture = {"device_map": device_map, "required": ("train", "generate", "reference")}
    check_experts(**mixture, num_experts=16)
    with pytest.raises(ValueError, match="train: ep=4 does not divide 6 experts; use 1 or 2"):
        check_experts(**mixture, num_experts=6)
    with pytest.raises(ValueError, match="train: ep=4 is for mixtures of experts, and this"):
        check_experts(**mixture, num_experts=None)


def check_experts(device_map, required, num_experts):
    hf = dict(SHAPES["qwen3-8b"])
    if num_experts:
        hf = SHAPES["qwen3-30b-a3b"] | {"num_experts": num_experts, "num_experts_per_tok": 2}
    device_map.check(parse_config(hf), required=required)


def test_a_map_made_in_code_is_checked_as_well():
    with pytest.raises(ValueError, match="role train has no ranks; give it some, as in train=all"):
        DeviceMap((Role("train", ()),), 4)
    with pytest.raises(ValueError, match="no rank -1"):
        DeviceMap((Role("train", (-1,)),), 4)
    with pytest.raises(ValueError, match="no role judge in the device map; it has train"):
        DeviceMap((Role("train", (0,)),), 4)["judge"]


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (
            "train=all,tp=3 generate=all",
            {},
            "role train: tp=3 does not divide 32 attention heads; use 1, 2, 4 or 8",
        ),
        (
            "train=all generate=0-5,tp=3",  # 6 ranks allow fewer sizes
            {},
            "role generate: tp=3 does not divide 32 attention heads; use 1 or 2",
        ),
        (
            "train=all,tp=4 generate=all",
            {"intermediate_size": 12290},
            "role train: tp=4 does not divide 12290 intermediate rows; use 1 or 2",
        ),
        (
            "train=all generate=all,tp=6",
            {"num_attention_heads": 48},
            "role generate: tp=6 is neither a divisor nor a multiple of 8 key/value heads; "
            "use 1, 2, 4, 8 or 24",
        ),
        ("train=all", {}, "role generate is missing; add it, as in generate=all"),
        ("train=all,cp=2 generate=all,cp=2", {}, "generate: cp=2 is for models that are trained"),
        (
            "train=all,fsdp=4 generate=all,fsdp=4",
            {},
            "role generate: fsdp=4 is for models that are sharded, .* leave it out",
        ),
        (
            "train=all genrate=all",
            {},
            "role genrate is not known; use train, generate, reference or critic",
        ),
        (
            "train=0-9 generate=12-20",
            {},
            "ranks 10-11,21-23 have no role and would idle; .*start 19 ranks",
        ),
        (
            "train=4-23 generate=all,tp=8",
            {},
            "rank 0 leads the engine on ranks 0-7 but is not in train, while ranks 4-7 are: .*"
            "add rank 0 to train, or .* an engine starts at rank 4",
        ),
    ],
)
def test_maps_that_the_model_or_recipe_cannot_run_are_rejected(text, changes, message):
    config = parse_config(SHAPES["qwen3-8b"] | changes)
    with pytest.raises(ValueError, match=message):
        parse_device_map(text, 24).check(config)


@pytest.mark.parametrize(
    "text",
    [
        "train=0-11 generate=12-23",
        "train=all generate=all reference=all",
        "train=0-3 generate=all",
        "train=0-5 generate=all,tp=4",  # the engine on 4-7 rests while 4 and 5 train
        "train=all,tp=4 generate=0-5,tp=2 reference=4-9",
        "train=1-23 generate=0-1,tp=1",
    ],
)
def test_overlaps_that_work_are_accepted(text):
    parse_device_map(text, 24).check(QWEN)


def test_a_role_with_its_own_model_is_checked_against_that_model():
    """The policy's 32 heads allow tp=8, and TINY's 7 do not; and the other way."""
    text, roles = "train=all generate=all judge=all,tp=8", ["train", "generate", "judge"]
    device_map = parse_device_map(text, 8)
    device_map.check(QWEN, required=roles, role_configs={"judge": QWEN})
    device_map.check(TINY, required=roles, role_configs={"judge": QWEN})
    message = "role judge: tp=8 does not divide 7 attention heads; use 1"
    with pytest.raises(ValueError, match=message):
        device_map.check(QWEN, required=roles, role_configs={"judge": TINY})
    with pytest.raises(ValueError, match=message):
        device_map.check(TINY, required=roles)


def test_roles_are_up_to_the_recipe():
    parse_device_map("train=all", 4).check(QWEN, required=["train"])
    with pytest.raises(ValueError, match="train is not known; use generate, reference or critic"):
        parse_device_map("train=all", 4).check(QWEN, required=["generate"])


# On 80 GiB, of which 72 are planned with. A rank of n holds 18/n bytes a parameter for train and
# reference, plus gathered weights and the head's gradient (8B: 10 GiB, 70B: 19); an engine 2/tp
# bytes a parameter, plus 32,768 tokens (8B: 4.5 GiB, 70B: 10) / tp. None: nothing fits.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tiny", {1: 1, 2: 1, 8: 1, 16: 1, 4096: 1}),
        ("qwen3-0.6b", {1: 1, 2: 1, 8: 1, 16: 1, 4096: 1}),
        # 137 + 10 GiB on one rank, 69 + 10 on each of two; 17 + 10 + 20 on each of eight
        ("qwen3-8b", {1: None, 2: None, 8: 1, 16: 1, 4096: 1}),
        # 74 + 19 GiB on each of 16; of 64: 18 + 19 + 141/4 = 73, so 8; of 4096: 19 + 141/4
        ("llama-3.1-70b", {1: None, 2: None, 8: None, 16: None, 64: 8, 4096: 4}),
    ],
)
def test_auto_shares_all_ranks_and_splits_only_what_does_not_fit(name, expected):
    config = TINY if name == "tiny" else shape_config(name)
    for world_size, tp in expected.items():
        if tp is None:
            with pytest.raises(ValueError, match=rf"do not fit on {world_size} ranks.*GiB of 72.0"):
                auto_device_map(world_size, config, 80 * GIB, ALL_ROLES)
            continue
        device_map, reasons = auto_device_map(world_size, config, 80 * GIB, ALL_ROLES)
        everywhere = tuple(range(world_size))
        assert device_map.roles == (
            Role("train", everywhere), Role("generate", everywhere, tp),
            Role("reference", everywhere),
        )  # fmt: skip
        assert f"tp={tp}: " in reasons[1] and "of 72.0 GiB" in reasons[1]
        assert (
            "rank 0" in reasons[0] if world_size == 1 else f"all {world_size} ranks" in reasons[0]
        )


def test_auto_raises_tp_on_smaller_devices_and_says_what_less_would_take():
    # 27.2 GiB to train and compare, 19.8 / tp to generate: 36 GiB are enough from tp=4
    device_map, reasons = auto_device_map(8, QWEN, 40 * GIB, ALL_ROLES)
    assert device_map["generate"].tp == 4
    assert "tp=4: 27.2 GiB to train" in reasons[1]
    assert "tp=2 would take 37.0 GiB" in reasons[1]


def test_auto_knows_adapters_and_engines_that_sleep():
    """8B on 80 GiB: frozen 15.3 GiB and an engine of 19.8 fit; masters and moments never do. On
    two ranks these take 61 GiB beside gradients and gathered weights, and 46 beside the engine."""
    roles = ["train", "generate"]
    for options, num_ranks in (({"lora_rank": 16}, 1), ({"engines_sleep": True}, 2)):
        with pytest.raises(ValueError, match="do not fit on"):
            auto_device_map(num_ranks, QWEN, 80 * GIB, roles)
        device_map, _ = auto_device_map(num_ranks, QWEN, 80 * GIB, roles, **options)
        assert device_map["generate"].tp == 1
    device_map, reasons = auto_device_map(1, QWEN, 80 * GIB, roles, must_fit=False)
    assert "of 72.0 GiB" in reasons[1]


def test_a_map_is_written_as_it_is_read():
    for text in ("train=0-3+6,tp=5 generate=all", "train=all,tp=4 generate=0-3"):
        assert parse_device_map(text, 8 if "all," in text else 7).text == text


def test_auto_places_no_engine_across_nodes():
    llama = shape_config("llama-3.1-70b")
    assert auto_device_map(64, llama, 80 * GIB, ALL_ROLES)[0]["generate"].tp == 8
    for ranks_per_node in (4, 12):  # 12 holds one engine of 8, and a part of the next
        with pytest.raises(ValueError, match="with tp=4, the largest possible"):
            auto_device_map(64, llama, 80 * GIB, ALL_ROLES, ranks_per_node=ranks_per_node)


def test_auto_chooses_sizes_that_divide_the_heads():
    smollm = shape_config("smollm2-135m")  # 3 kv heads: no power of two but 1
    with pytest.raises(ValueError, match="with tp=1, the largest possible"):
        auto_device_map(8, smollm, GIB, ALL_ROLES)


def test_auto_on_a_cpu_and_without_an_engine():
    device_map, reasons = auto_device_map(4, shape_config("llama-3.1-70b"), None, ALL_ROLES)
    assert [role.tp for role in device_map.roles] == [1, 1, 1] and "CPU" in reasons[1]
    device_map, reasons = auto_device_map(2, shape_config("qwen3-0.6b"), 80 * GIB, ["train"])
    assert device_map.names == ("train",) and "generate" not in reasons[1]
    with pytest.raises(ValueError, match="memory of role poet is not known"):
        auto_device_map(2, QWEN, 80 * GIB, ["train", "poet"])
