// Sends the time when the slider stops, and tells it while it moves. The page works without this.
"use strict";

const slide = document.getElementById("slide");

if (slide) {
  const shown = document.getElementById("shown");
  const at = document.getElementById("at");
  const oldest = Number(slide.dataset.oldest);
  const newest = Number(slide.dataset.newest);
  let timer = 0;

  slide.addEventListener("input", () => {
    const time = oldest + ((newest - oldest) * slide.value) / 1000;
    const text = new Date(time).toISOString().replace("T", " ").slice(0, 19) + "Z";
    at.value = slide.value === slide.max ? "" : text;
    shown.textContent = at.value || "now";
    slide.setAttribute("aria-valuetext", shown.textContent);
  });
  // The arrow keys change the slider step by step: the form goes once they rest.
  slide.addEventListener("change", () => {
    clearTimeout(timer);
    timer = setTimeout(() => slide.form.requestSubmit(), 600);
  });
}
