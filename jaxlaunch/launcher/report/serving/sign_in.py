"""The page that asks for a token, below a sentence that says why. Pure: it repeats nothing of what a viewer sent."""

from __future__ import annotations

import html

from jaxlaunch.launcher.report import page

NOT_ACCEPTED = "The cluster does not accept this token: it is wrong or has expired. Sign in with a new one."
NO_RIGHTS = (
    "You may not list jobs in any namespace that this dashboard shows. Ask an administrator for the rights of a viewer"
    " (rbac.viewers of the chart)."
)
_FORM = (
    '<form method="post" action="/sign-in" class="controls">',
    '<label>Token <input type="password" name="token" autocomplete="off" required autofocus></label>',
    "<button>Sign in</button>",
    "</form>",
    '<p class="quiet">A token of the cluster is your own, or that of a ServiceAccount: '
    "<code>kubectl create token NAME --namespace NAMESPACE</code> prints one. This page shows what the token may see,"
    " and keeps it in a cookie of this browser, encrypted, for at most twelve hours.</p>",
)


def page_of(sentence: str, *, has_form: bool, is_led_here: bool) -> str:
    """The page. `is_led_here`: a link on another site led to it, to which a browser adds no cookie."""
    again = "Show the jobs, if you have signed in already." if is_led_here and has_form else "Try again."
    link = f'<p><a href="/">{again}</a></p>' if is_led_here or not has_form else ""
    body = (f'<p role="alert">{html.escape(sentence)}</p>', *(_FORM if has_form else ()), link)
    return page.form("Sign in", ("<main>", "<h1>Jobs</h1>", *body, "</main>"))
