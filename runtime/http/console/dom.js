// Elements made from data. Texts become text nodes and attributes, never markup.

const SVG = "http://www.w3.org/2000/svg";

// Strokes on a grid of 20 x 20.
const ICONS = {
  menu: "M3 6h14M3 10h14M3 14h14",
  plus: "M10 4v12M4 10h12",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6.5 6.5h7v7h-7z",
  copy: "M7.5 7.5h8v9h-8zM12.5 7.5v-4h-8v9h3",
  check: "M4.5 10.5l3.5 3.5 7.5-8",
  edit: "M4 16l.8-3.6L13.2 4l2.8 2.8-8.4 8.4z",
  again: "M15.5 10a5.5 5.5 0 1 1-1.8-4.1M15.5 3v3.4h-3.4",
  next: "M8 5l5 5-5 5",
  previous: "M12 5l-5 5 5 5",
  trash: "M4 6h12M8 6V4h4v2M6 6l.7 10h6.6L14 6",
  settings: "M3 6h8M15 6h2M3 14h2M9 14h8M13 4v4M7 12v4",
  close: "M5 5l10 10M15 5L5 15",
  key: "M12.5 7.5m-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0M10 10l-6.5 6.5M6 14l2 2",
  theme: "M10 3.5a6.5 6.5 0 1 0 0 13zM10 3.5a6.5 6.5 0 0 1 0 13",
  help: "M7.5 7.8a2.5 2.5 0 1 1 3.6 2.2c-.8.4-1.1.9-1.1 1.8M10 15v.2",
};

/** An element with properties and children. `on...` are listeners, `text` its text, `data` its dataset;
    undefined, null and false leave an attribute out. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function icon(name) {
  return svg(
    "svg",
    { viewBox: "0 0 20 20", class: "icon", "aria-hidden": "true" },
    svg("path", { d: ICONS[name] }),
  );
}

/** A button that shows an icon, with its name for those who do not see it. */
export function iconButton(name, label, onclick, props = {}) {
  return h(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...props },
    icon(name),
  );
}

export const $ = (id) => document.getElementById(id);

/** Puts text on the clipboard; shows for a moment on `button` that it is there. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // pages without TLS have no clipboard
    const area = h("textarea", { value: text, class: "off-screen", "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const before = [...button.childNodes];
  button.replaceChildren(icon("check"));
  button.classList.add("done");
  announce("Copied");
  setTimeout(() => {
    button.replaceChildren(...before);
    button.classList.remove("done");
  }, 1200);
}

/** Says something to screen readers. */
export function announce(text) {
  $("announcer").textContent = text;
}

/** A file that the browser saves. */
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export const prefersStill = () => matchMedia("(prefers-reduced-motion: reduce)").matches;
export const isTouch = () => matchMedia("(pointer: coarse)").matches;
