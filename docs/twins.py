"""Programs read the site too: each page gets a twin in Markdown, and `llms.txt` lists the twins.

The twin of `how-to/serve.html` is `how-to/serve.html.md`, as llmstxt.org names it. It is written
from the resolved page and not from the source, because half of a source may be directives:
docstrings, an included file, the table of a module. Links lead from twin to twin, and are relative,
so that a copy of the site works anywhere. A construct that this module cannot write is a warning,
and fails `make docs`.

A description is the text that an index says behind the link to a page, or else the page's first
sentence. `llms.txt` has it, and so has the page's head, for search engines.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any, Final

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

SUFFIX: Final = ".html.md"
INDEX: Final = "llms.txt"

_LOG = logging.getLogger(__name__)
_SPECIAL = re.compile(r"[\\`*[]|(?<![^\W_])_|_(?![^\W_])|<(?=[A-Za-z/!?])|&(?=#?\w+;)")
_BLOCK_START = re.compile(r"^(?=[#>=~+-])|^(\d+)(?=[.)])", re.MULTILINE)
TYPED: Final = str.maketrans(
    {
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{EN DASH}": "--",
        "\N{EM DASH}": "---",
        "\N{HORIZONTAL ELLIPSIS}": "...",
    }
)
"""What Sphinx made of quotes and dashes, as it was typed."""
_LISTED = re.compile(r"\]\(([^)#\s]+)\.md\)(?:: | \| )((?:[^\n|]+)(?:\n  [^\n]+)*)")
_SENTENCE = re.compile(r".+?[.:](?=\s|$)", re.DOTALL)


class Twin:
    """One page as Markdown. `link` turns the address of a link into that of the twin."""

    def __init__(self, link: Callable[[str], str]) -> None:
        self._link = link

    def page(self, document: nodes.Element) -> str:
        return "\n\n".join(self.blocks(document, 0)) + "\n"

    def blocks(self, node: nodes.Element, level: int) -> Iterator[str]:
        """The blocks inside `node`, whose title has the level `level`."""
        inline: list[nodes.Node] = []
        for child in node.children:
            if isinstance(child, nodes.Text) or _is_inline(child):
                inline.append(child)
                continue
            yield from self._paragraph(inline)
            inline = []
            yield from self.block(child, level)
        yield from self._paragraph(inline)

    def block(self, node: nodes.Node, level: int) -> Iterator[str]:
        match node:
            case _ if _is_dropped(node):
                pass
            case nodes.title() | nodes.rubric():
                deeper = isinstance(node, nodes.rubric)
                yield _heading(level + deeper, self.inline(node))
            case nodes.section():
                yield from self.blocks(node, level + 1)
            case nodes.paragraph() | addnodes.compact_paragraph():
                yield from self._paragraph(node.children)
            case nodes.literal_block() | nodes.doctest_block():
                yield _fenced(node.astext(), _language(node))
            case nodes.caption():
                yield f"*{self.inline(node)}*"
            case nodes.bullet_list() | nodes.enumerated_list():
                yield self._list(node, level)
            case nodes.definition_list():
                yield from self._definitions(node, level)
            case nodes.field_list():
                yield "\n".join(self._fields(node, level))
            case nodes.block_quote():
                yield _indented("\n\n".join(self.blocks(node, level)), "> ", "> ")
            case nodes.table():
                yield from self._table(node, level)
            case addnodes.desc():  # an admonition, by its class
                yield from self._described(node, level)
            case nodes.Admonition():
                name = node.tagname.capitalize()
                inside = "\n\n".join(self.blocks(node, level))
                yield _indented(f"**{name}:** {inside}", "> ", "> ")
            case nodes.transition():
                yield "---"
            case nodes.line_block():
                yield "\\\n".join(self.inline(line) for line in node.children)
            case (
                nodes.document()
                | nodes.compound()
                | nodes.container()
                | nodes.figure()
                | addnodes.versionmodified()
                | addnodes.glossary()
            ):
                yield from self.blocks(node, level)
            case _:
                _LOG.warning("no Markdown for %s", node.tagname, location=node)

    def inline(self, node: nodes.Node) -> str:
        return "".join(self._piece(child) for child in node.children)

    def _piece(self, node: nodes.Node) -> str:
        match node:
            case nodes.Text():
                return _SPECIAL.sub(r"\\\g<0>", node.astext().translate(TYPED))
            case nodes.literal():
                return _code(node.astext())
            case nodes.emphasis() | nodes.title_reference():
                return f"*{self.inline(node)}*"
            case nodes.strong():
                return f"**{self.inline(node)}**"
            case nodes.reference():
                return f"[{self.inline(node)}]({self._address(node)})"
            case addnodes.download_reference() if "filename" in node:
                return f"[{self.inline(node)}]({self._link('/_downloads/' + node['filename'])})"
            case nodes.image():
                return "" if "only-dark" in node["classes"] else self._image(node)
            case _ if _is_dropped(node):
                return ""
            case _:
                return self.inline(node)

    def _image(self, node: nodes.image) -> str:
        return f"![{node.get('alt', '')}]({node['uri']})"

    def _address(self, node: nodes.reference) -> str:
        if "refid" in node:
            return f"#{node['refid']}"
        return self._link(node.get("refuri", ""))

    def _paragraph(self, pieces: Any) -> Iterator[str]:
        text = "".join(self._piece(each) for each in pieces).strip()
        if text:
            yield _BLOCK_START.sub(lambda found: f"{found[1] or ''}\\", text)

    def _list(self, node: nodes.Element, level: int) -> str:
        items = []
        first = node.get("start", 1)
        for number, item in enumerate(node.children, first):
            mark = f"{number}. " if isinstance(node, nodes.enumerated_list) else "* "
            inside = list(self.blocks(item, level))
            tight = [block for block in inside if not block.startswith(("* ", "1. "))]
            joined = ("\n\n" if len(tight) > 1 else "\n").join(inside)
            items.append(_indented(joined, mark, " " * len(mark)))
        return "\n".join(items)

    def _definitions(self, node: nodes.Element, level: int) -> Iterator[str]:
        for item in node.children:
            terms = [self.inline(each) for each in item.children if isinstance(each, nodes.term)]
            inside = [each for each in item.children if isinstance(each, nodes.definition)]
            text = "\n\n".join(block for each in inside for block in self.blocks(each, level))
            yield _indented(f"**{', '.join(terms)}**: {text}", "* ", "  ")

    def _fields(self, node: nodes.Element, level: int) -> Iterator[str]:
        for field in node.children:
            name, body = field.children
            text = "\n\n".join(self.blocks(body, level))
            yield _indented(f"**{self.inline(name)}**: {text}", "* ", "  ")

    def _table(self, node: nodes.table, level: int) -> Iterator[str]:
        rows = [
            [self._cell(entry, level) for entry in row.children] for row in node.findall(nodes.row)
        ]
        head = bool(list(node.findall(nodes.thead)))
        width = max(len(row) for row in rows)
        lines = rows if head else [[""] * width, *rows]
        lines.insert(1, ["---"] * width)
        yield "\n".join(f"| {' | '.join(row)} |" for row in lines)

    def _cell(self, entry: nodes.Node, level: int) -> str:
        text = " ".join(self.blocks(entry, level))
        return " ".join(text.split()).replace("|", "\\|")

    def _described(self, node: addnodes.desc, level: int) -> Iterator[str]:
        for child in node.children:
            if isinstance(child, addnodes.desc_signature):
                yield _heading(level + 1, _code(" ".join(child.astext().split())))
            elif isinstance(child, addnodes.desc_content):
                yield from self.blocks(child, level + 1)


def _is_dropped(node: nodes.Node) -> bool:
    """What a page does not show, or shows to browsers alone."""
    return isinstance(node, nodes.Invisible | nodes.raw | addnodes.index | addnodes.toctree)


def _is_inline(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Inline | nodes.image) and not isinstance(node, nodes.Invisible)


def _heading(level: int, text: str) -> str:
    return f"{'#' * min(max(level, 1), 6)} {text}"


def _code(text: str) -> str:
    """Code in a line, between more backticks than it has."""
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def _fenced(text: str, language: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def _language(node: nodes.Element) -> str:
    language = str(node.get("language", ""))
    return "" if language in ("default", "none") else language


def _indented(text: str, first: str, rest: str) -> str:
    lines = text.split("\n")
    return "\n".join(
        ((rest if number else first) + line).rstrip() for number, line in enumerate(lines)
    )


def description(env: Any, docname: str) -> str:
    """What an index says of a page, or its first sentence. One line of Markdown."""
    found = _listed(env).get(docname) or env.metadata[docname].get("first sentence", "")
    return " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", found).split())


def _listed(env: Any) -> dict[str, str]:
    """The text behind each link of a page that has a list of pages."""
    texts = {}
    for index in env.toctree_includes:
        for target, text in _LISTED.findall(Path(env.doc2path(index)).read_text(encoding="utf-8")):
            docname = posixpath.normpath(posixpath.join(posixpath.dirname(index), target))
            texts[docname] = text
    return texts


def _note_first_sentence(app: Any, document: nodes.document) -> None:
    """Keep the first sentence of a page that is more than a command."""
    for paragraph in document.findall(nodes.paragraph):
        for sentence in _SENTENCE.findall(Twin(lambda uri: uri).inline(paragraph)):
            if len(re.sub("`[^`]*`", "", sentence)) > 20:
                app.env.metadata[app.env.docname]["first sentence"] = sentence.strip(" :")
                return


def _write_twin(
    app: Any, docname: str, _template: str, context: dict[str, Any], document: Any
) -> None:
    """Write the twin beside the page, and name it in the page's head."""
    if document is None:  # the search, the indexes
        return

    def link(uri: str) -> str:
        if re.match(r"[a-z]+:", uri):
            return uri
        path, mark, anchor = uri.partition("#")
        if path.startswith("/"):
            return posixpath.relpath(path[1:], posixpath.dirname(docname) or ".")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(docname), path))
        is_page = target.endswith(".html") and target[:-5] in app.env.found_docs
        return f"{path}.md{mark}{anchor}" if is_page else uri

    target = Path(app.outdir) / f"{docname}{SUFFIX}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(Twin(link).page(document), encoding="utf-8")
    said = escape(re.sub(r"[`*\\]", "", description(app.env, docname)))
    twin = posixpath.basename(docname) + SUFFIX
    context["metatags"] = (
        f'{context.get("metatags", "")}<meta name="description" content="{said}">\n'
        f'<link rel="alternate" type="text/markdown" href="{twin}">\n'
    )


def _write_index(app: Any, error: Exception | None) -> None:
    """Write `llms.txt`: the title, what it is, and each page with its description."""
    if error is not None or app.builder.format != "html":
        return
    env, root = app.env, app.config.root_doc
    sections = [("Start here", [root])]
    for child in env.toctree_includes[root]:
        if child in env.toctree_includes:
            sections.append((env.titles[child].astext(), list(_below(env, child))))
        else:
            sections[0][1].append(child)
    lines = [f"# {app.config.project}", "", f"> {_summary(env, root)}", ""]
    lines += [f"These pages are of version {app.config.release}. Each is Markdown."]
    for title, docnames in sections:
        lines += ["", f"## {title}", ""]
        for docname in docnames:
            name = env.titles[docname].astext()
            lines.append(f"- [{name}]({docname}{SUFFIX}): {description(env, docname)}")
    (Path(app.outdir) / INDEX).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _summary(env: Any, root: str) -> str:
    """The first paragraph of the first page."""
    paragraph = next(env.get_doctree(root).findall(nodes.paragraph))
    return " ".join(paragraph.astext().split())


def _below(env: Any, docname: str) -> Iterator[str]:
    yield docname
    for child in env.toctree_includes.get(docname, ()):
        yield from _below(env, child)


def setup(app: Any) -> dict[str, Any]:
    # A page is written again when this module changes, as it is when a setting does.
    app.add_config_value(
        "twins_digest", hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), "html", str
    )
    app.connect("doctree-read", _note_first_sentence)
    app.connect("html-page-context", _write_twin)
    app.connect("build-finished", _write_index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
