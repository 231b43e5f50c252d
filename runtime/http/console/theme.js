// Runs before the page is drawn: the theme that was chosen, so that nothing flashes in the other one.
(() => {
  "use strict";
  try {
    const theme = localStorage.getItem("runtime-console-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // storage is blocked: the system's theme
  }
})();
