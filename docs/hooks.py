"""MkDocs hooks: files outside docs/, such as SECURITY.md, become pages of the site under their own links."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = {
    "SECURITY.md": "project/security.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "tests/golden/README.md": "project/golden.md",
    "tests/fuzz/README.md": "project/fuzz.md",
}
CODE = re.compile(r"<code>.*?</code>", re.S)
FLAG = re.compile(r"(?<![\w-])--\w[\w-]*")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links that leave docs/ to the page of that file; a file without a page is named only."""
    here = page.file.src_uri
    original = next((source for source, name in OUTSIDE.items() if name == here), f"docs/{here}")

    def changed(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(original), target))
        if path.startswith("docs/"):
            inside = path.removeprefix("docs/")
        elif path in OUTSIDE:
            inside = OUTSIDE[path]
        else:
            return text
        return f"[{text}]({posixpath.relpath(inside, posixpath.dirname(here) or '.')}{anchor})"

    # GitHub starts a list after a line of text, Python-Markdown after an empty one
    markdown = re.sub(r"^(?![-|>#\s])(.+)\n(?=- )", r"\1\n\n", markdown, flags=re.M)
    return LINK.sub(changed, markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Mark the flags in code, so that a browser does not break a line after their dashes (assets/site.css)."""
    return CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), content)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """State the language of a Chinese page: browsers choose the shapes of characters by it."""
    return output.replace('<html lang="en"', '<html lang="zh-CN"', 1) if page.file.src_uri.startswith("zh/") else output
