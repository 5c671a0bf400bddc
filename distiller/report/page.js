"use strict";
// Draws every figure of the page in the page's own colours, again when these change between light and dark.
const isDark = matchMedia("(prefers-color-scheme: dark)");
const hasMouse = matchMedia("(pointer: fine)").matches;
const plots = Array.from(document.querySelectorAll("[data-figure]"));

function pageColours() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const text = colour("--text"), line = colour("--line");
  return {
    "font.color": text, "xaxis.gridcolor": line, "yaxis.gridcolor": line, "xaxis.linecolor": line, "yaxis.linecolor": line,
    "hoverlabel.bgcolor": colour("--raised"), "hoverlabel.font.color": text,
  };
}

async function draw() {
  for (const plot of plots) {
    const figure = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
    // On a touch screen a finger on a chart moves the page.
    figure.layout.dragmode = hasMouse ? "zoom" : false;
    await Plotly.newPlot(plot, figure.data, figure.layout, { responsive: true, displayModeBar: false });
    await Plotly.relayout(plot, pageColours());
  }
  document.documentElement.dataset.drawn = String(plots.length);
}

isDark.addEventListener("change", () => plots.forEach((plot) => Plotly.relayout(plot, pageColours())));
draw();
