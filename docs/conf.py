"""The site: docs/*.md, the docstrings and the executed notebooks, by Sphinx.

`make docs` installs what it needs.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS / "_extensions"), str(ROOT)]

import eagle3_jax  # noqa: E402

project = "eagle3-jax"
author = "The eagle3-jax authors"
copyright = author
version = release = eagle3_jax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_design",
    "sphinx_copybutton",
    "pages",  # notebooks and files of the repository that are pages, and links to other files
    "recorded_run",  # the server's page with recorded runs
    "mathml",
    "narrow",  # tables on narrow screens
    "moving_picture",
    "drafting_page",  # the page that computes with recorded distributions
    "sphinx_markdown_builder",
    "llms",  # llms.txt, and every page as Markdown
]
# `notebooks/` and `repository/` are written by `pages`, and not under version control.
exclude_patterns = ["_build", "_extensions", "pictures/*.py", "**/.ipynb_checkpoints"]
suppress_warnings = ["mystnb.unknown_mime_type"]

# Pages and notebooks. Notebooks were executed by notebooks/run.py; nothing runs here.
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # from a server elsewhere
nb_merge_streams = True
nb_mime_priority_overrides = [("markdown", "text/markdown", 10), ("markdown", "text/plain", 20)]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto", "path"]
myst_update_mathjax = False
html_math_renderer = "mathml"

# The reference.
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_attr_annotations = False
add_module_names = False
toc_object_entries_show_parents = "hide"
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(enum|flax)\..*|eagle3_jax\.types\.State|eagle3_jax\.devices\.sharding\.Axis")
]
# PromQL of metrics with a colon in their names is more than Pygments knows.
suppress_warnings += ["misc.highlighting_failure"]


def setup(app):  # noqa: D103
    # Roles in prose are checked. Annotations name types of other packages too, whose pages are not
    # fetched.
    app.connect("warn-missing-reference", lambda app, domain, node: "refwarn" not in node or None)
    app.connect("missing-reference", _by_last_name)
    app.connect("autodoc-process-signature", _signature)


def _signature(app, kind, name, obj, options, arguments, returned):
    """Hides the arguments of protocols, which no user calls, and shortens the names of arrays."""
    if getattr(obj, "_is_protocol", False):
        return "", None

    return _with_short_names(arguments), _with_short_names(returned)


def _with_short_names(text):
    return text and text.replace("jaxlib._jax.Array", "Array")


def _by_last_name(app, env, node, content):
    """Links a name of its home module to the object that is documented under its public name."""
    from sphinx.util.nodes import make_refnode

    if node.get("refdomain") != "py":
        return None

    ending = "." + node["reftarget"].rpartition(".")[2]
    objects = {entry.node_id: (name, entry) for name, entry in env.domains["py"].objects.items()}
    matches = [
        entry for name, entry in objects.values() if name.endswith(ending) and name.count(".") <= 4
    ]
    if len(matches) != 1 or matches[0].objtype in ("method", "property", "attribute"):
        return None

    entry = matches[0]
    return make_refnode(
        app.builder, node.get("refdoc", env.docname), entry.docname, entry.node_id, content
    )


# In the docstring of a property, words before a colon are not a type.
from sphinx.ext.napoleon.docstring import GoogleDocstring  # noqa: E402

GoogleDocstring._parse_attribute_docstring = GoogleDocstring._consume_to_end

# The look.
html_theme = "sphinx_book_theme"
html_title = "eagle3-jax"
html_short_title = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "_static" / "scorer.js")
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_permalinks_icon = "#"
html_context = {"default_mode": "auto"}
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "home_page_in_toc": False,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "logo": {"text": "eagle3-jax"},
    "article_footer_items": [],
    "footer_content_items": ["extra-footer"],
    "navbar_persistent": [],
    "extra_footer": "<p>Apache-2.0. Every page is also there as Markdown: the same address with "
    "<code>.md</code> for <code>.html</code>; <code>llms.txt</code> at the root lists them.</p>",
}
copybutton_exclude = ".linenos, .gp, .go"
