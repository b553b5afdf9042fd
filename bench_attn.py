import sys, time, functools, traceback
import jax, jax.numpy as jnp, numpy as np
from pallas_kernels.attention.mosaic_sm90.forward import forward, ForwardConfig
from pallas_kernels.attention.mosaic_sm90.backward_dq import backward_dq, DqConfig
from pallas_kernels.attention.mosaic_sm90.backward_dkv import backward_dkv, DkvConfig
from pallas_kernels.attention.options import Options
from pallas_kernels.attention import cudnn, reference
from pallas_kernels.attention.mosaic_sm90.common import LOG2E
print(jax.devices())
def data(B,S,H,K,D,seed=0):
    r=np.random.default_rng(seed)
    return [jnp.asarray(r.standard_normal((B,S,n,D),dtype=np.float32),jnp.bfloat16) for n in (H,K,K,H)]
def rel(a,b): a=np.asarray(a,np.float64);b=np.asarray(b,np.float64);return np.linalg.norm(a-b)/np.linalg.norm(b)
def bwd(q,k,v,do,out,lse,o,dqc,dkvc,ranges=None):
    B,S,H,_=q.shape
    delta=jnp.sum(do.astype(jnp.float32)*out.astype(jnp.float32),-1).transpose(0,2,1)
    delta=jnp.pad(delta,((0,0),(0,0),(0,lse.shape[2]-S)))
    l2=lse*LOG2E
    dq=backward_dq(q,k,v,do,l2,delta,ranges,None,None,options=o,config=dqc)
    dk,dv=backward_dkv(q,k,v,do,l2,delta,ranges,None,None,options=o,config=dkvc)
    return dq,dk,dv
def time_it(f,*a,n=12,rounds=5):
    f=jax.jit(f); jax.block_until_ready(f(*a)); ts=[]
    for _ in range(rounds):
        t=time.perf_counter()
        for _ in range(n): r=f(*a)
        jax.block_until_ready(r); ts.append((time.perf_counter()-t)/n)
    return float(np.median(ts))*1e3
# correctness
for (B,S,H,K,D) in ((2,512,4,2,128),(1,700,4,1,64),(1,1024,2,2,128)):
    q,k,v,do=data(B,S,H,K,D); o=Options(D**-0.5)
    f32=[x.astype(jnp.float32) for x in (q,k,v)]
    ref,vjp=jax.vjp(lambda *a: reference.attention(*a),*f32); g=vjp(do.astype(jnp.float32))
    try:
        out,lse=forward(q,k,v,None,None,None,None,options=o,config=ForwardConfig())
        print((B,S,H,K,D),"fwd",rel(out,ref), "cudnn" , rel(cudnn.attention(q,k,v,None,None,True,o.scale),ref) if S%2==0 else None)
        dq,dk,dv=bwd(q,k,v,do,out,lse,o,DqConfig(),DkvConfig())
        c=jax.vjp(lambda *a: cudnn.attention(*a,None,None,True,o.scale),q,k,v)[1](do)
        print("   bwd",[rel(a,b) for a,b in zip((dq,dk,dv),g)],"cudnn",[rel(a,b) for a,b in zip(c,g)],flush=True)
    except Exception: traceback.print_exc()
for (B,S) in ((4,4096),(4,8192)):
    H,K,D=32,8,128; q,k,v,do=data(B,S,H,K,D); o=Options(D**-0.5)
    flop=2*2*B*H*S*S*D/2
    f=lambda t,x=1: f"{t:.3f} ms {flop*x/t/1e9:.0f} TFLOP/s"
    cf=lambda q,k,v: cudnn.attention(q,k,v,None,None,True,o.scale)
    def cb(q,k,v,do): out,vjp=jax.vjp(cf,q,k,v); return out,*vjp(do)
    print("== ",B,S,"cudnn fwd",f(time_it(cf,q,k,v)),"fwd+bwd",f(time_it(cb,q,k,v,do),3.5),flush=True)
    for c in [ForwardConfig(pingpong=p,block_kv=b,stages=s,overlap=ov) for ov in (False,True) for p in (True,False) for b,s in ((128,2),(64,4),(96,3),(176,1) if False else (112,2))]:
        if c.overlap and not hasattr(ForwardConfig,"HAS_OVERLAP"): continue
        try: print(c, f(time_it(functools.partial(forward,ranges=None,query_offset=None,sinks=None,seed=None,options=o,config=c),q,k,v)),flush=True)
        except Exception as e: print(c,"FAILED",str(e)[:200])
    out,lse=forward(q,k,v,None,None,None,None,options=o,config=ForwardConfig())
    delta=jnp.ones_like(lse)
    for c in [DqConfig(b,s,l) for b,s,l in ((128,2,False),(64,4,False),(64,4,True),(64,3,True),(96,2,False),(96,2,True),(80,2,True))]:
        try: t=time_it(functools.partial(backward_dq,ranges=None,query_offset=None,seed=None,options=o,config=c),q,k,v,do,lse,delta); print(c,f(t,1.5),flush=True)
        except Exception as e: print(c,"FAILED",str(e)[:200])
    for c in [DkvConfig(b,s) for b,s in ((64,2),(64,3),(64,4),(32,6),(48,4) if False else (80,3))]:
        try: t=time_it(functools.partial(backward_dkv,ranges=None,query_offset=None,seed=None,options=o,config=c),q,k,v,do,lse,delta); print(c,f(t,2),flush=True)
        except Exception as e: print(c,"FAILED",str(e)[:200])
