"""The results of the README in Chinese: the same lines, figures untouched, their words replaced.

Every sentence that ``benchmarks.report`` writes has a rule here; a test holds that none is left in English.
"""

from __future__ import annotations

import re

# Whole cells of tables, and the words that some cells are made of.
CELLS = {
    "our speed over": "与谁相比",
    "problems": "问题数",
    "geometric mean": "速度比的几何平均",
    "least": "最小值",
    "faster, even, slower": "更快、持平、更慢",
    "forward": "前向",
    "backward": "反向",
    "forward + backward": "前向 + 反向",
    "forward, us": "前向，us",
    "forward + backward, us": "前向 + 反向，us",
    "batch, heads, seqlen, dims": "batch、头数、序列长度、head dim",
    "ours, us": "我们，us",
    "theirs, us": "对方，us",
    "speed": "速度比",
    "ours, peak MiB": "我们的峰值，MiB",
    "theirs, peak MiB": "对方的峰值，MiB",
    "all scores, MiB": "全部分数，MiB",
    "not timed": "未计时",
    "state": "状态",
    "share of a copy": "占拷贝带宽",
    "in place": "原位更新",
    "not in place": "非原位",
    "the formula through torch.compile": "同一公式经 torch.compile",
    "the formula in eager PyTorch": "同一公式的 eager PyTorch",
    "fla's chunk_retention": "fla 的 chunk_retention",
}

TITLES = {
    "Attention forward": "注意力前向",
    "Attention backward": "注意力反向",
    "Retention with an explicit mask": "显式 mask 的 retention",
    "Retention with decay": "带衰减的 retention",
    "fla's chunk_retention alone": "单独运行的 fla chunk_retention",
    "Decoding with retention": "用 retention 解码",
    "The grid of published comparisons": "论文中常用的网格",
    "The same grid with head dim 256": "同一网格，head dim 256",
    "Layers of named models": "知名模型的层",
    "Decoding: few queries on long keys": "解码：少量 query 对长 key",
    "Short sequences": "短序列",
}

PICTURES = {
    "TFLOP/s by sequence length": "各序列长度的 TFLOP/s",
    "Our speed over each other's": "与各家相比的速度",
}

NAMES = {
    "the tuned pick": "调优后选用的内核",
    "forward and backward, both tuned": "前向与反向（均经调优）",
    "the formula through torch.compile": "同一公式经 torch.compile",
    "the formula in eager PyTorch": "同一公式的 eager PyTorch",
    "fla's chunk_retention": "fla 的 chunk_retention",
    ", forward + backward through autograd": "（经 autograd 的前向 + 反向）",
    ", forward + backward": "（前向 + 反向）",
    ", forward": "（前向）",
    ", backward": "（反向）",
    "ours": "我们",
}


CHARACTER = "[\u4e00-\u9fff]"
ONE_RUN = "全部在同一次运行中交替计时，L2 为冷。"
RULES: tuple[tuple[str, str], ...] = (
    (r"### (?P<title>.+) on (?P<gpu>.+)", "### {title}：{gpu}"),
    (r"!\[(?P<picture>.+) \((?P<what>.+)\)\]\((?P<path>.+)\)", "![{picture}（{what}）]({path})"),
    (
        r"<details><summary>Every case</summary>",
        "<details><summary>全部情形</summary>",
    ),
    (
        r"TFLOP/s of (?P<name>.+), fp16, 16k tokens, hidden size 2048, by head dim and sequence length; in brackets "
        r"its speed over (?P<peer>.+), bold where it is slower\. All in one interleaved run with a cold L2\.",
        "{name}的 TFLOP/s，fp16，16k 个 token，hidden size 2048，按 head dim 与序列长度排列；括号内是相对于 {peer} 的"
        "速度比，落后处加粗。" + ONE_RUN,
    ),
    (
        r"`retnet_attn_func` with an explicit mask of .+",
        "`retnet_attn_func`，mask 取 RetNet 的值并显式给出，fp16，非因果：调优后选用的内核与同一公式在 PyTorch 中各用的"
        "微秒数、速度比（落后处加粗），以及一次调用的显存峰值，旁边是一个装下全部分数的张量的大小。"
        "每个方向各自在一次运行中交替计时，L2 为冷。",
    ),
    (
        r"`retention_func` with the usual decays.+",
        "`retention_func`，常用的衰减，fp16，form 为 `auto`，不传入也不取出状态：双方都按程序中的方式调用，各用的"
        "微秒数与速度比（落后处加粗）。" + ONE_RUN,
    ),
    (
        r"The same shapes in a run without ours.+ torch (?P<torch>\S+); driver and clocks were not read\.",
        "同样的形状，在没有我们参与的一次运行中：设备事件之间的中位数。每次调用都排在设备的一次等待和一次清空 L2 的"
        "写显存之后，因此看不到启动之前的 Python 时间。另一次运行，torch {torch}；未读取驱动版本与时钟。",
    ),
    (
        r"One token for every sequence of a batch \((?P<what>.+)\), graph replays: time, bytes that must move over "
        r"that time, and its share of the (?P<rate>\S+) GB/s of a copy in the same run\.",
        "batch 中每个序列一个 token（{what}），以 CUDA graph 重放：时间、必须搬运的字节数除以该时间，以及它占"
        "同一次运行中拷贝带宽 {rate} GB/s 的比例。",
    ),
    (
        r"Our speed over each other's in one interleaved run.+",
        "与各家相比的速度，未经调优（即安装后直接调用时的内核）；落后处加粗。" + ONE_RUN,
    ),
    (r"Against (?P<peer>.+):", "与 {peer} 相比："),
    (r"Why some are not timed:", "有些未计时的原因："),
    (
        r"- (?P<shape>[^a-z]+), (?P<name>\S+): the check's answer is (?P<reason>.+)",
        "- {shape}，{name}：检查的结论是 {reason}",
    ),
    (
        r"Speed over (?P<peer>.+), (?P<count>\d+) problems: geometric mean (?P<mean>\S+), least (?P<least>\S+) "
        r"\((?P<at>.+)\)\.",
        "相对于 {peer} 的速度比，{count} 个问题：几何平均 {mean}，最小 {least}（{at}）。",
    ),
    (
        r"Deterministic mode takes (?P<mean>\S+) times as long as the pick, (?P<count>\d+) problems' geometric mean, "
        r"at most (?P<most>\S+) \((?P<at>.+)\)\.",
        "确定性模式的用时是选用内核的 {mean} 倍（{count} 个问题的几何平均），最多 {most} 倍（{at}）。",
    ),
    (
        r"(?P<gpu>.+), driver (?P<driver>\S+), CUDA (?P<cuda>\S+), torch (?P<torch>[^,\s]+)"
        r"(?:, SM clock after each race (?P<low>\d+) to (?P<high>\d+) MHz)?, (?P<time>\d{4}-[^,\s]+)"
        r"(?:, rows of an earlier run since (?P<since>\S+))?\.",
        "{gpu}，驱动 {driver}，CUDA {cuda}，torch {torch}{clocks}，{time}{earlier}。",
    ),
    (
        r"All of this on one page.+\((?P<path>\S+)\), to be opened in a browser\.",
        "以上全部在一页之中，含每一行以及我们落后之处：[{path}]({path})，用浏览器打开。",
    ),
    (r"No results are committed yet\.", "尚无提交的结果。"),
)
"""(a whole line, what it becomes); groups are put in, and those called name, peer, title and picture translated."""


def chinese(text: str) -> str:
    """The lines of results in Chinese."""
    return "\n".join(map(_line, text.split("\n")))


def _line(line: str) -> str:
    if line.startswith("|"):
        return "|".join(_cell(cell) for cell in line.split("|"))
    for pattern, becomes in RULES:
        found = re.fullmatch(pattern, line)
        if found:
            text = becomes.format_map(_translated(found)).replace("） ", "）")
            return re.sub(
                rf"(?<={CHARACTER}) (?={CHARACTER})", "", text
            )  # where a name is in Chinese
    return line


def _cell(cell: str) -> str:
    words = cell.strip()
    known = CELLS.get(words)
    if known is None:
        known = re.sub(r"^(d\S+) causal$", r"\1 因果", words)
        known = re.sub(r"\((d\S+) causal (\S+)\)", r"(\1 因果 \2)", known)
        known = known.replace(" through autograd", " 经 autograd")
    return cell.replace(words, known) if words else cell


def _translated(found: re.Match[str]) -> dict[str, str]:
    groups = {name: value or "" for name, value in found.groupdict().items()}
    for name in ("name", "peer"):
        for words, becomes in NAMES.items():
            groups[name] = groups.get(name, "").replace(words, becomes)
    groups["title"] = TITLES.get(groups.get("title", ""), groups.get("title", ""))
    groups["picture"] = PICTURES.get(groups.get("picture", ""), groups.get("picture", ""))
    low, high = groups.get("low"), groups.get("high")
    groups["clocks"] = f"，每场之后的 SM 时钟 {low} 至 {high} MHz" if low else ""
    since = groups.get("since")
    groups["earlier"] = f"，其中部分行来自更早的一次运行（{since} 起）" if since else ""
    return groups
