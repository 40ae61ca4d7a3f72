"""Gantt chart of a cluster run as one self-contained HTML page: wheel to zoom, drag to move, hover for details."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence

from headway.policy.placement.view import ClusterInstance
from headway.sim.cluster.result import GanttBar
from headway.sim.report.gantt import colours, shown
from headway.sim.report.style import BAND, FAINT, INK

_KINDS = ("span", "batch", "hold", "pause", "transfer")

_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>@TITLE@</title>
<style>body{font:13px system-ui,sans-serif;color:@INK@;margin:16px}h1{font-size:16px}canvas{width:100%;display:block;
cursor:grab}#tip{min-height:1.4em;color:#555}</style>
<h1>@TITLE@</h1><div id="tip">Wheel: zoom. Drag: move. Double click: all of it. @NOTE@</div><canvas id="c"></canvas>
<script>
const D=@DATA@,K=@KINDS@,H=18,L=60,c=document.getElementById('c'),g=c.getContext('2d');
const tip=document.getElementById('tip');
let a=0,b=D.end,drag=null;
const y=i=>D.rows[i].y*H+6;
function draw(){
const r=devicePixelRatio||1,w=c.clientWidth,h=D.height*H+40;
c.width=w*r;c.height=h*r;c.style.height=h+'px';
g.setTransform(r,0,0,r,0,0);g.clearRect(0,0,w,h);const s=(w-L)/(b-a),x=t=>L+(t-a)*s;g.font='11px system-ui';
g.save();g.beginPath();g.rect(L,0,w-L,h);g.clip();
for(const [k,i,t0,t1,n,note] of D.bars){
if(t1<a||t0>b)continue;
const X=x(t0),W=Math.max(1,x(t1)-X),Y=y(i),kind=K[k];
if(kind=='span'){g.fillStyle=D.colours[n];g.fillRect(X,Y,W,H-3);if(W>34){g.fillStyle='#fff';g.fillText(n,X+3,Y+12,W-4)}}
else if(kind=='batch'){g.fillStyle='@BAND@';g.fillRect(X,Y+3,W,H-9)}
else if(kind=='transfer'){g.fillStyle='@INK@';g.fillRect(X,Y+H-3,W,2)}
else{g.strokeStyle='@FAINT@';g.setLineDash(kind=='hold'?[]:[3,3]);g.strokeRect(X,Y-1,W,H-1);g.setLineDash([])}}
g.restore();g.fillStyle='@INK@';for(const i in D.rows)g.fillText(D.rows[i].name,4,y(i)+12);
const step=Math.pow(10,Math.floor(Math.log10((b-a)/4)));
for(let t=Math.ceil(a/step)*step;t<=b;t+=step){
g.fillRect(x(t),D.height*H+8,1,5);g.fillText(+t.toFixed(4)+' s',x(t)+2,D.height*H+24)}}
const time=e=>{const r=c.getBoundingClientRect();return a+(e.clientX-r.left-L)/(r.width-L)*(b-a)};
c.onwheel=e=>{e.preventDefault();const t=time(e),f=e.deltaY>0?1.25:0.8;
a=Math.max(0,t-(t-a)*f);b=Math.min(D.end,t+(b-t)*f);draw()};
c.onmousedown=e=>drag=time(e);onmouseup=()=>drag=null;c.ondblclick=()=>{a=0;b=D.end;draw()};
c.onmousemove=e=>{
const t=time(e);
if(drag!==null){const d=Math.max(-a,Math.min(D.end-b,drag-t));a+=d;b+=d;draw();return}
const Y=e.clientY-c.getBoundingClientRect().top;
for(const [k,i,t0,t1,n,note] of D.bars)if(t>=t0&&t<=t1&&Y>=y(i)-1&&Y<y(i)+H-1){
const at=`${t0.toFixed(3)} to ${t1.toFixed(3)} s (${(t1-t0).toFixed(3)} s)`;
tip.textContent=`${D.rows[i].name}: ${K[k]} ${n} ${note}  ${at}`}};
onresize=draw;draw();
</script></html>
"""


def gantt_page(
    bars: Sequence[GanttBar], instances: Sequence[ClusterInstance], title: str = "", until_s: float | None = None
) -> str:
    """Return the page's HTML. Names from a scenario are escaped."""
    chosen, end_s = shown(bars, until_s)
    chosen.sort(key=lambda bar: bar.kind == "transfer")
    rows, at, node = {}, 0.0, instances[0].node if instances else 0
    for instance in instances:
        at += 0.5 if instance.node != node else 0.0
        node = instance.node
        rows[instance.id] = {"y": at, "name": f"{instance.role[0].upper()}{instance.id} n{instance.node}"}
        at += 1.0
    data = {
        "end": end_s,
        "height": at,
        "rows": rows,
        "colours": colours(chosen),
        "bars": [
            [_KINDS.index(b.kind), b.instance, round(b.start_s, 6), round(min(b.end_s, end_s), 6), b.request, b.note]
            for b in chosen
        ],
    }
    left_out = len(bars) - len(chosen)
    words = {
        "TITLE": html.escape(title or "Cluster"),
        "NOTE": f"{left_out:,} bars are not shown." if left_out else "",
        "INK": INK,
        "BAND": BAND,
        "FAINT": FAINT,
        "KINDS": json.dumps(_KINDS),
        "DATA": json.dumps(data, separators=(",", ":")).replace("</", "<\\/"),
    }
    page = _PAGE
    for name, text in words.items():
        page = page.replace(f"@{name}@", text)
    return page
