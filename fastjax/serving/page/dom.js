// Elements of the page. Text is always set as text.

export const byId = (id) => document.getElementById(id);

/** An element with properties and children; strings become text. `data` sets data-*, `attributes` any attribute. */
export function element(tag, { data = {}, attributes = {}, ...properties } = {}, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, properties);
  Object.assign(made.dataset, data);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** An element of SVG with attributes. */
export function drawn(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** A value kept for this tab, or for the browser with `localStorage`; storage may be full or forbidden. */
export function kept(name, otherwise, storage = () => sessionStorage) {
  try {
    const text = storage().getItem(`fastjax.${name}`);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

/** Keep a value; null: forget it. Says whether it is kept. */
export function keep(name, value, storage = () => sessionStorage) {
  try {
    if (value === null) storage().removeItem(`fastjax.${name}`);
    else storage().setItem(`fastjax.${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Say a sentence to screen readers. */
export function announce(sentence) {
  byId("status").textContent = sentence;
}
