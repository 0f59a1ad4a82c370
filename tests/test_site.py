"""The site that `make docs` builds: each page has its twin in Markdown, and `llms.txt` lists it."""

from __future__ import annotations

import html
import importlib.util
import posixpath
import re
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

pytest.importorskip("sphinx", reason="Sphinx 9 needs Python 3.11")

from docutils import nodes
from docutils.utils import new_document
from markdown_it import MarkdownIt
from sphinx.util.inventory import InventoryFile

from tests.harness.site import built
from tests.test_documents import DOCS, PAGES, ROOT

pytestmark = pytest.mark.xdist_group("site")

NAMES = [page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES]
_LINE = re.compile(r"- \[(.+?)\]\((\S+)\): (.+)")
_DIRECTIVE = re.compile(r"^(```|:::)\{(?!toctree|code-block)|\{\w+\}`", re.MULTILINE)


@pytest.fixture(scope="session")
def site() -> Path:
    return built()


def loaded(file: Path) -> ModuleType:
    """A module of the documents. They are no package."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def twins() -> ModuleType:
    return loaded(DOCS / "twins.py")


def test_each_page_has_its_twin_and_its_line(site: Path) -> None:
    listed = [line.groups() for line in _LINE.finditer((site / "llms.txt").read_text())]
    assert sorted(target for _, target, _ in listed) == sorted(f"{name}.html.md" for name in NAMES)
    for title, target, said in listed:
        twin = (site / target).read_text()
        assert twin.startswith(f"# {title}\n\n")
        page = (site / target.removesuffix(".md")).read_text()
        assert f'rel="alternate" type="text/markdown" href="{Path(target).name}"' in page
        (described,) = re.findall(r'<meta name="description" content="(.+?)">', page)
        assert words(html.unescape(described)) == words(said)


def test_the_list_has_the_form_of_llmstxt(site: Path) -> None:
    head, *sections = (site / "llms.txt").read_text().split("\n## ")
    assert re.fullmatch(r"# kvstore\n\n> kvstore is .+\n\n.*\bversion \d+\.\d+\.\d+\b.*\n", head)
    assert len(sections) >= 4
    for section in sections:
        title, blank, *lines = section.strip().split("\n")
        assert title
        assert not blank
        assert all(_LINE.fullmatch(line) for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_a_twin_says_what_its_page_says(name: str, site: Path) -> None:
    source, twin = ((DOCS / f"{name}.md").read_text(), (site / f"{name}.html.md").read_text())
    assert [token.tag for token in MarkdownIt().parse(twin)].count("h1") == 2  # opened and closed
    if not _DIRECTIVE.search(source):
        source = re.sub(r"```\{toctree\}.*?```\n", "", source, flags=re.DOTALL)
        source = re.sub(r"```\{code-block\} (\w+)\n:caption: (\S+)\n", r"*\2*\n```\1\n", source)
        assert words(rendered(twin)) == words(rendered(source))


def test_the_twins_of_docstrings_and_included_files_have_their_text(site: Path) -> None:
    errors = (site / "reference" / "errors.html.md").read_text()
    assert "## `exception kvstore.errors.UsageError" in errors
    assert (
        "data    := | framed user key | suffix u64 |"
        in (site / "reference" / "formats.html.md").read_text()
    )
    assert "### `kvstore doctor`" in (site / "reference" / "commands.html.md").read_text()


def test_each_link_of_a_twin_is_relative_and_leads_to_a_file(site: Path) -> None:
    found = 0
    for name in [*NAMES, "llms.txt"]:
        file = site / (name if name == "llms.txt" else f"{name}.html.md")
        prose = re.sub(r"^(`{3,}).*?^\1$", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"(?<!`)\]\(([^)\s]+)\)", prose):
            path = target.partition("#")[0]
            if path and "://" not in target:
                assert not path.startswith("/")
                assert (file.parent / path).exists(), f"{name}: {target}"
                found += 1
    assert found > 200


def test_the_pictures_are_those_that_their_script_draws() -> None:
    timeline = loaded(DOCS / "pictures" / "timeline.py")
    assert set(timeline.COLOURS) == {"light", "dark"}
    for name, colours in timeline.COLOURS.items():
        drawn = (DOCS / "pictures" / f"timeline-{name}.svg").read_text()
        assert drawn == timeline.picture(colours), "run docs/pictures/timeline.py"


def test_the_first_page_has_an_install_line_and_ten_lines_of_code() -> None:
    page = (DOCS / "index.md").read_text()
    assert "\npip install kvstore-mvcc\n" in page
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert code.count("\n") <= 10


def test_figures_of_the_comparison_come_from_the_benchmarks() -> None:
    figures = loaded(DOCS / "figures.py")
    text = (ROOT / "BENCHMARKS.md").read_text()
    (lmdb,) = re.findall(
        r"^\| read one key \(`get`\) \| \S+ \| (\S+) \|", figures.tables(text), re.M
    )
    assert re.search(rf"^\| get \|.*\| {lmdb} \|", text, re.MULTILINE)
    with pytest.raises(Exception, match=r"BENCHMARKS.md has no row get with lmdb"):
        figures.find(text.replace("| get |", "| got |"), "get", ["lmdb"])
    typed = (DOCS / "explanation" / "comparison.md").read_text()
    assert re.findall(r"\d+\.\d", typed) == []


_LOADED = re.compile(
    r"<(?:script|img|iframe|source|link(?![^>]*rel=.(?:next|prev|canonical)))[^>]*"
    r"(?:src|href|srcset)=.(?:https?:)?//[^>]*>|url\(.?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*;"
)


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    files = [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]
    assert len(files) > len(NAMES)
    loads = {
        (file.relative_to(site).as_posix(), load)
        for file in files
        for load in _LOADED.findall(file.read_text())
    }
    assert loads == set()
    assert (site / "searchindex.js").stat().st_size > 100_000


@pytest.mark.parametrize(
    "text",
    [
        '<script async src="https://elsewhere/x.js"></script>',
        "<link rel='stylesheet' href='//elsewhere/x.css'>",
        '<img alt="" src="http://elsewhere/x.png">',
        "body { background: url(https://elsewhere/x.png) }",
        '@import "https://elsewhere/x.css";',
    ],
)
def test_what_would_load_is_found(text: str) -> None:
    assert _LOADED.search(text)
    assert not _LOADED.search(text.replace("https:", "").replace("http:", "").replace("//", ""))


def test_other_sites_can_link_to_our_names_and_words(site: Path) -> None:
    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", posixpath.join)
    assert "kvstore.open" in inventory["py:function"]
    assert {"kvstore.Store", "kvstore.Client"} <= set(inventory["py:class"])
    assert "kvstore.Store.get" in inventory["py:method"]
    assert {"hold", "as of", "feed"} <= set(inventory["std:term"])


def test_signatures_link_to_the_documents_of_python_and_arrow(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "reference").rglob("*.html"))
    for address in (
        "https://docs.python.org/3/library/datetime.html#datetime.timedelta",
        "https://arrow.apache.org/docs/python/generated/pyarrow.Schema.html#pyarrow.Schema",
    ):
        assert f'href="{address}"' in pages


def test_the_words_are_some_twenty_that_many_pages_use(site: Path) -> None:
    page = (DOCS / "reference" / "words.md").read_text()
    terms = re.findall(r"^(\w[\w ]*)\n  \S", page, re.MULTILINE)
    assert 18 <= len(terms) <= 24
    assert page.count("*Elsewhere: ") == len(terms)
    texts = [other.read_text().lower() for other in PAGES if other.name != "words.md"]
    for term in terms:
        used = sum(term in re.sub(r"[_\s]", " ", text) for text in texts)
        assert used >= 5, f"{term} is a word of {used} pages"
        assert (
            f'id="term-{term.replace(" ", "-")}"' in (site / "reference" / "words.html").read_text()
        )


def rendered(markdown: str) -> str:
    """What a reader of `markdown` sees."""
    parser = MarkdownIt().enable("table")
    shown = parser.render(re.sub(r"!\[[^]]*\]\([^)]*\)", "", markdown))
    return html.unescape(re.sub(r"<[^>]*>", " ", shown))


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1))
@example("*a* _b_ __init__ a_b <script> &amp; `c` [d](e) ![f](g)")
@example("# no heading")
@example("1. no list\n2) nor here\n- nor\n+ here\n> or\n=== here")
@example("~~~ no fence")
@example("\\")
def test_text_of_any_kind_stays_text(twins: ModuleType, text: str) -> None:
    document = new_document("page")
    document += nodes.paragraph("", "", nodes.Text(text))
    tokens = MarkdownIt().parse(twins.Twin(str).page(document))
    if not text.strip():
        assert tokens == []
        return
    opened, inside, closed = tokens
    assert (opened.type, closed.type) == ("paragraph_open", "paragraph_close")
    assert {each.type for each in inside.children} <= {"text", "text_special", "softbreak"}
    shown = "".join(each.content or "\n" for each in inside.children)
    assert shown.split() == text.translate(twins.TYPED).split()


@given(st.text("`a| \\*<", min_size=1).filter(lambda text: text.strip() == text))
def test_code_of_any_kind_stays_code(twins: ModuleType, text: str) -> None:
    document = new_document("page")
    document += nodes.paragraph("", "", nodes.literal("", text))
    document += nodes.literal_block("", text)
    markdown = twins.Twin(str).page(document)
    shown = html.unescape(MarkdownIt().render(markdown))
    assert shown == f"<p><code>{text}</code></p>\n<pre><code>{text}\n</code></pre>\n"
