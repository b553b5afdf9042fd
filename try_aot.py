import os, sys, time
os.environ.setdefault("JAX_PLATFORMS","cpu"); os.environ["MOSAIC_GPU_DUMP_PTXAS"]="1"
import jax, jax.numpy as jnp, numpy as np
from tests.support.aot import AOT
from pallas_kernels.attention import mosaic_sm90 as m
from pallas_kernels.attention.mosaic_sm90.config import *
from pallas_kernels.attention.options import Options
from pallas_kernels.attention.mask import Mask
from pallas_kernels.attention.ranges import SegmentRanges, TILE
aot=AOT()
B,S,H,K=4,4096,32,8
which=sys.argv[1:]
def go(name,f,*a):
    if which and not any(w in name for w in which): return
    t=time.time()
    try: c=aot.compile(f,*a); print("####", name, round(time.time()-t,1),flush=True)
    except Exception as e: print("#### FAILED",name,str(e)[:300],flush=True)
def cases(tag,D,Dv,fc=None,qc=None,kc=None,ranges=False,sinks=False,**o):
    o=Options(D**-0.5,**({"query_offset":0}|o))
    x=[aot.spec((B,S,n,d),jnp.bfloat16) for n,d in ((H,D),(K,D),(K,Dv))]
    y=[aot.spec((B,S,H,Dv),jnp.bfloat16)]+[aot.spec((B,H,S),jnp.float32)]*2
    i=lambda *s: aot.spec(s,jnp.int32)
    r=SegmentRanges(*[i(B,S)]*4,*[i(B,S//TILE)]*2) if ranges else None
    mk=Mask(r,None,None,i(1)); sk=aot.spec((H,),jnp.float32) if sinks else None; sd=aot.spec((2,),jnp.uint32) if o.dropout_rate else None
    go(f"fwd{tag}-{D}",lambda q,k,v,mk,sk,sd: m.forward(q,k,v,mk,sk,sd,o,config=fc),*x,mk,sk,sd)
    def b(q,k,v,do,l,d,mk,sd,which):
        a=m.backward(q,k,v,mk,None,sd,l,d,do,o,dq=qc,dkv=kc); return a[0] if which=="dq" else a[1:]
    for w in ("dq","dkv"): go(f"{w}{tag}-{D}",lambda q,k,v,do,l,d,mk,sd: b(q,k,v,do,l,d,mk,sd,w),*x,*y,mk,sd)
if __name__=="__main__":
    for D in (128,64,80,96,112,192,256): cases("",D,D)
    cases("MLA",192,128)
    cases("ranges",128,128,ranges=True,query_offset=None)
    cases("window",128,128,sliding_window=1024)
    cases("cap",128,128,logits_soft_cap=50.0)
    cases("sinks",128,128,sinks=True)
    cases("drop",128,128,dropout_rate=0.1)
