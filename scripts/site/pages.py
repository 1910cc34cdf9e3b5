"""Pages of the site that are not files of docs/: README, changelog, API and linked sources.

MkDocs calls the functions ``on_*``. The API pages list what the packages export, so a new public
name appears on the site by itself.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[2]
# By file name: a title, names that come first, and packages that export the rest. Each name is on
# the first page that has its package.
API: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "trainer": ("Trainer", ("helios.Trainer",), ()),
    "model": ("Model", ("helios.Model",), ("helios.model",)),
    "data": ("Data", ("helios.DataModule", "helios.DataLoaderParams"), ("helios.data",)),
    "context": ("Context", ("helios.Context",), ()),
    "plugins": ("Plugins", ("helios.Plugin",), ("helios.plugins",)),
    "loops": ("Loops", (), ("helios.loops",)),
    "engines": ("Engines", ("helios.Engine", "helios.Precision"), ()),
    "ledger": ("Ledger", (), ("helios.ledger",)),
    "sweep": (
        "Sweeps",
        ("helios.sweep.Sweep", "helios.sweep.Trial", "helios.sweep.TrialResult"),
        (),
    ),
    "options": ("Options, functions and state", (), ("helios",)),
    "errors": ("Errors", ("helios.HeliosError",), ("helios",)),
    "core": ("Utilities", (), ("helios.core",)),
}
_INTRO = {
    "model": "Besides these methods, a model may override the [events](../hooks.md).",
    "plugins": "[Plugins](../plugins.md) shows how to use them. They may override the "
    "[events](../hooks.md).",
    "data": "[Data](../data.md) has examples.",
    "loops": "[Loops](../loops.md) has the tree of loops and examples.",
    "engines": "[Engines](../engines.md) and [Precision](../precision.md) have examples.",
    "ledger": "[The ledger and replay](../ledger.md) has examples.",
    "sweep": "[Sweeps](../recipes/sweeps.md) has an example.",
}
_RARELY_SEARCHED = ("architecture.md", "changelog.md", "design.md")
_AT_THE_TOP = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def _imports(module: str) -> dict[str, str]:
    """Return the names that a module imports from others, each with the module it names."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("helios"):
            names = {alias.asname or alias.name: str(node.module) for alias in node.names}
            found |= _imports(str(node.module)) if "*" in names else names
    return found


def exports(package: str) -> dict[str, str]:
    """Return the public names of a package, each with the module that it is imported from."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text("utf-8"))
    lists = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    modules = _imports(package)
    return {name: modules.get(name, package) for name in lists[0] if not name.startswith("__")}


def api_names() -> dict[str, list[str]]:
    """Return the names of each API page, in order; each name is on one page."""
    placed = {name.rpartition(".")[2] for _, first, _ in API.values() for name in first}
    pages = {}
    for page, (_, first, packages) in API.items():
        found = {
            name: f"{package}.{name}"
            for package in packages
            for name in exports(package)
            if name not in placed and name.endswith("Error") == (page == "errors")
        }
        placed |= found.keys()
        pages[page] = [*first, *found.values()]
    return pages


def _api_links() -> dict[str, str]:
    """Return the place on the API pages of each module that defines a public name."""
    pages = {
        name.rpartition(".")[2]: f"api/{page}.md#{name}"
        for page, names in api_names().items()
        for name in names
    }
    links: dict[str, str] = {}
    for package in {package for _, _, packages in API.values() for package in packages}:
        for name, module in exports(package).items():
            links.setdefault(f"{module.replace('.', '/')}.py", pages[name])
    for page, (_, _, packages) in API.items():
        links |= {package.replace(".", "/"): f"api/{page}.md" for package in packages}
    return links


def _links_of(path: str, text: str) -> set[str]:
    """Return what a page of the repository links to, as paths from the root."""
    folder = posixpath.dirname(path)
    return {posixpath.normpath(posixpath.join(folder, link)) for link in _LINK.findall(text)}


def _site_path(target: str, api: Mapping[str, str]) -> str:
    """Return where the site has a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return _AT_THE_TOP.get(target) or api.get(target) or f"sources/{target}.md"


def on_config(config: Any) -> Any:
    """Replace each entry ``folder/*`` of the navigation by the pages of the folder."""
    names = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    names += [f"api/{page}.md" for page in API]

    def expand(entries: list[Any]) -> list[Any]:
        expanded: list[Any] = []
        for entry in entries:
            if isinstance(entry, dict):
                ((title, inner),) = entry.items()
                inner = expand(inner) if isinstance(inner, list) else inner
                expanded.append({title: inner})
            elif entry.endswith("/*"):
                folder = entry.removesuffix("*")
                pages = [name for name in names if name.startswith(folder)]
                pages = pages if folder == "api/" else sorted(pages)
                expanded += [page for page in pages if not page.endswith("README.md")]
            else:
                expanded.append(entry)
        return expanded

    config["nav"] = expand(config["nav"])
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    # The names of the pages are tested where MkDocs is not installed.
    from mkdocs.structure.files import File

    contents = {site: (ROOT / path).read_text("utf-8") for path, site in _AT_THE_TOP.items()}
    contents["extra.css"] = (Path(__file__).parent / "extra.css").read_text("utf-8")
    for page, names in api_names().items():
        parts = [f"# {API[page][0]}", _INTRO.get(page, ""), *(f"::: {name}" for name in names)]
        contents[f"api/{page}.md"] = "\n\n".join(parts)
    texts = {path: contents[site] for path, site in _AT_THE_TOP.items()}
    texts |= {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    api = _api_links()
    for target in sorted(set[str]().union(*(_links_of(*item) for item in texts.items()))):
        site = _site_path(target, api)
        if site.startswith("sources/") and (ROOT / target).is_file():
            code = (ROOT / target).read_text("utf-8")
            contents[site] = f"# {target}\n\n````python\n{code}````\n"
    contents["index.md"] = f"---\nhide: [navigation]\n---\n{contents['index.md']}"
    for site, content in contents.items():
        files.append(File.generated(config, site, content=content))
    return files


def follow_links(text: str, path: str, site: str) -> str:
    """Let the links of a page lead to where the site has what they name.

    Args:
        text: the page.
        path: where it is in the repository.
        site: where it is on the site.
    """
    api = _api_links()

    def follow(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[1]))
        return posixpath.relpath(_site_path(target, api), posixpath.dirname(site) or ".")

    return _LINK.sub(follow, text)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links of handwritten pages lead to pages of the site, and the search find those first."""
    site = page.file.src_uri
    if site.startswith("sources/"):
        page.meta["search"] = {"exclude": True}
        return markdown
    if site.startswith("api/") or site in _RARELY_SEARCHED:
        page.meta["search"] = {"boost": 0.3}
    if site.startswith("api/"):
        return markdown
    path = next((path for path, top in _AT_THE_TOP.items() if top == site), f"docs/{site}")
    return follow_links(markdown, path, site)
