// Draw dashboards in a headless browser and say what became of every panel.
//   node shoot.mjs JOB.json
// JOB: {modules, browser, bundle, out, query, dashboards: [path]}. Writes OUT/NAME.png and prints one JSON object:
// dashboard -> {errors: [text], panels: [{title, type, state, pixels, text}]}.
import { createRequire } from 'node:module';
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';

const job = JSON.parse(fs.readFileSync(process.argv[2], 'utf8'));
const { chromium } = createRequire(path.join(job.modules, 'x.js'))('playwright-core');
const DRAW_MILLISECONDS = 60_000;

let dashboard = '';
const page = '<!doctype html><meta charset=utf-8><link rel=stylesheet href=/page.css><body style="margin:0"><div id=root></div><script src=/page.js></script>';
const server = http.createServer((request, response) => {
  const name = request.url.split('?')[0];
  const file = { '/page.js': `${job.bundle}/page.js`, '/page.css': `${job.bundle}/page.css`, '/dashboard.json': dashboard }[name];
  if (name !== '/' && !file) return response.writeHead(404).end();
  const type = { '.js': 'text/javascript', '.css': 'text/css', '.json': 'application/json' }[path.extname(file || '')];
  response.setHeader('content-type', type || 'text/html');
  return response.end(file ? (fs.existsSync(file) ? fs.readFileSync(file) : '') : page);
});
await new Promise((listening) => server.listen(0, '127.0.0.1', listening));

const browser = await chromium.launch({
  executablePath: job.browser,
  args: ['--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking', '--disable-component-update', '--disable-sync'],
});
const results = {};
for (const file of job.dashboards) {
  dashboard = file;
  const tab = await browser.newPage({ viewport: { width: 1280, height: 900 } });
  const errors = [];
  tab.on('pageerror', (error) => errors.push(`page: ${error.message}`));
  // The page has no icon and no fonts of Grafana's server: what it does not find is not an error of a panel.
  tab.on('console', (line) => line.type() === 'error' && !/404/.test(line.text()) && errors.push(`console: ${line.text()}`));
  await tab.goto(`http://127.0.0.1:${server.address().port}/?${job.query}`);
  await tab.waitForFunction(
    () => {
      const all = [...document.querySelectorAll('[data-panel]')];
      return all.length > 0 && all.every((one) => one.dataset.state !== 'loading');
    },
    null,
    { timeout: DRAW_MILLISECONDS }
  );
  await tab.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 300)))));
  const panels = await tab.$$eval('[data-panel]', (all) =>
    all.map((one) => ({
      title: one.dataset.panel,
      type: one.dataset.type,
      state: one.dataset.state,
      pixels: [...one.querySelectorAll('canvas')].reduce((sum, canvas) => {
        const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let drawn = 0;
        for (let index = 3; index < data.length; index += 4) if (data[index]) drawn += 1;
        return sum + drawn;
      }, 0),
      text: one.innerText.replace(/\s+/g, ' ').slice(0, 200),
    }))
  );
  await tab.screenshot({ path: path.join(job.out, `${path.basename(file, '.json')}.png`), fullPage: true });
  results[path.basename(file, '.json')] = { errors, panels };
  await tab.close();
}
await browser.close();
server.close();
console.log(JSON.stringify(results, null, 1));
