// For a page that is served: it reloads when the store has changed. Its address keeps what was picked.

const ASK_MS = 5000;

async function ask() {
  if (document.hidden) return;
  try {
    const answer = await fetch("version", { cache: "no-store" });
    if (answer.ok && (await answer.text()) !== facts.version) location.reload();
    show("away", !answer.ok);
  } catch {
    show("away", true); // the server may come back
  }
}

// Keep colours that were chosen by hand when the page reloads.
const THEME = "layerstore-theme";
for (let clicks = 0; clicks < 2 && (document.documentElement.dataset.theme ?? "") !== (sessionStorage.getItem(THEME) ?? ""); clicks += 1) $("theme").click();
$("theme").addEventListener("click", () => sessionStorage.setItem(THEME, document.documentElement.dataset.theme ?? ""));
setInterval(ask, ASK_MS);
document.addEventListener("visibilitychange", ask);
