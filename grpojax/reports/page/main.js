overview();
completions();
heldOut();
curves();
differences();
rewards();
speed();
failures();
settings();
const NAV = el("nav", { "aria-label": "Parts of the report" }, PARTS.map(([id, title]) =>
  el("a", { href: `#${id}` }, title)));
document.body.insertBefore(NAV, MAIN);
MAIN.append(el("footer", null, "Written by grpojax.report. This page loads no other " +
  "files."));
