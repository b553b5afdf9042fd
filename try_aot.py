import os, sys, time
os.environ.setdefault("JAX_PLATFORMS","cpu"); os.environ["MOSAIC_GPU_DUMP_PTXAS"]="1"
import jax, jax.numpy as jnp
from tests.support.aot import AOT
from pallas_kernels.attention.mosaic_sm90.forward import forward, ForwardConfig
from pallas_kernels.attention.mosaic_sm90.backward_dq import backward_dq, DqConfig
from pallas_kernels.attention.mosaic_sm90.backward_dkv import backward_dkv, DkvConfig
from pallas_kernels.attention.options import Options
aot=AOT()
B,S,H,K,D=4,4096,32,8,128
o=Options(D**-0.5)
x=[aot.spec((B,S,n,D),jnp.bfloat16) for n in (H,K,K)]
y=[aot.spec((B,S,H,D),jnp.bfloat16)]+[aot.spec((B,H,S),jnp.float32)]*2
which=sys.argv[1:]
def go(name,f,*a):
    if which and name not in which: return
    t=time.time(); c=aot.compile(f,*a); print("####", name, time.time()-t)
go("fwd",lambda q,k,v: forward(q,k,v,None,None,None,None,options=o,config=ForwardConfig()),*x)
go("dq",lambda q,k,v,do,l,d: backward_dq(q,k,v,do,l,d,None,None,None,options=o,config=DqConfig()),*x,*y)
go("dqlag",lambda q,k,v,do,l,d: backward_dq(q,k,v,do,l,d,None,None,None,options=o,config=DqConfig(lag=True)),*x,*y)
go("dkv",lambda q,k,v,do,l,d: backward_dkv(q,k,v,do,l,d,None,None,None,options=o,config=DkvConfig()),*x,*y)
for b,s,l in ((64,4,False),(64,4,True),(96,2,False),(96,2,True),(80,2,True)):
    go(f"dq{b}{l}",lambda q,k,v,do,ls,d: backward_dq(q,k,v,do,ls,d,None,None,None,options=o,config=DqConfig(b,s,l)),*x,*y)
for p in (True,False):
  for b,st in ((128,2),(64,4)):
    go(f"ov{p}{b}",lambda q,k,v: forward(q,k,v,None,None,None,None,options=o,config=ForwardConfig(overlap=True,pingpong=p,block_kv=b,stages=st)),*x)
