// The page's start: colours, views, the drawer of settings, and what the server serves. The address's query is not read.

import { Chat } from "./chat.js";
import { byId, keep, kept } from "./dom.js";
import { RunView } from "./run.js";
import { models, runRows } from "./server.js";
import { Settings } from "./settings.js";

const THEMES = { system: "Auto", light: "Light", dark: "Dark" };
const shared = () => localStorage;

function watchTheme() {
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    byId("theme").lastChild.textContent = THEMES[theme];
    byId("theme").title = `Colours: ${theme === "system" ? "as the system" : theme}`;
    byId("theme").setAttribute("aria-label", byId("theme").title);
  };
  let theme = kept("theme", "system", shared);
  if (!(theme in THEMES)) theme = "system";
  show(theme);
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    keep("theme", theme, shared);
    show(theme);
  });
}

/** The settings beside the chat, or over it where the window is narrow; returns what opens them at a field. */
function watchDrawer() {
  const [panel, button, shade] = [byId("settings"), byId("open-settings"), byId("shade")];
  const narrow = matchMedia("(max-width: 899px)");
  const show = (open) => {
    panel.hidden = !open;
    shade.hidden = !(open && narrow.matches);
    button.setAttribute("aria-expanded", String(open));
    for (const other of [document.querySelector("#chat > main"), document.querySelector("body > header")]) {
      other.inert = open && narrow.matches;
    }
  };
  const close = () => { show(false); button.focus(); };
  show(!narrow.matches);
  narrow.addEventListener("change", () => show(!narrow.matches));
  button.addEventListener("click", () => {
    show(panel.hidden);
    if (!panel.hidden) byId("close-settings").focus();
  });
  byId("close-settings").addEventListener("click", close);
  shade.addEventListener("click", close);
  panel.addEventListener("keydown", (event) => { if (event.key === "Escape") close(); });
  return (field) => {
    show(true);
    field.closest("details")?.setAttribute("open", "");
    field.focus();
  };
}

/** Tabs of chat and run, by the ARIA practices' pattern. */
function watchViews(opened) {
  const names = ["chat", "run"];
  const show = (name) => {
    for (const one of names) {
      const tab = byId(`tab-${one}`);
      tab.setAttribute("aria-selected", String(one === name));
      tab.tabIndex = one === name ? 0 : -1;
      byId(one).hidden = one !== name;
    }
    for (const id of ["clear", "open-settings"]) byId(id).hidden = name !== "chat";
    keep("view", name);
    opened(name);
  };
  for (const name of names) {
    byId(`tab-${name}`).addEventListener("click", () => show(name));
    byId(`tab-${name}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = names.find((one) => one !== name);
      show(other);
      byId(`tab-${other}`).focus();
    });
  }
  return show;
}

async function start() {
  watchTheme();
  const chat = new Chat(new Settings(byId("fields")), watchDrawer());
  const run = new RunView(byId("run-body"));
  const show = watchViews((name) => run.watch(name === "run"));
  byId("clear").addEventListener("click", () => chat.clear());
  if (matchMedia("(pointer: fine)").matches) byId("prompt").focus();
  try {
    const served = await models();
    chat.offer(served);
    document.title = `${served[0]?.id ?? "no model"} – fastjax`;
    byId("views").hidden = !run.take(await runRows("", 0));
    if (!byId("views").hidden && kept("view", "chat") === "run") show("run");
  } catch (error) {
    chat.notice(`${error.message} Load the page again.`);
  }
}

start();
